"""Finds the Python package video_vae: installed with pip, copied into this folder, or in the repository around it."""

import importlib.util
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent  # through the link, if the folder is linked

if importlib.util.find_spec("video_vae") is None:
    for _place in (_here, _here.parents[1] / "python" / "src"):
        if (_place / "video_vae" / "__init__.py").is_file():
            sys.path.append(str(_place))
            break
    else:
        raise ImportError(
            "the Python package video_vae is missing: `pip install` the folder host-examples/python of the video-vae "
            f"repository into ComfyUI's Python, or copy its src/video_vae into {_here}"
        )
