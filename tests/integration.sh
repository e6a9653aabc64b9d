#!/usr/bin/env bash
# Runs the Python hosts inside the programs they are for: PyTorch, diffusers, ComfyUI and the pack
# ComfyUI-SeedVR2_VideoUpscaler. None of them is a part of this repository; CI has none of them.
#
#   tests/integration.sh --python PYTHON [--comfyui FOLDER] [--pack FOLDER]
#
# PYTHON has torch, numpy and pytest, and what the folders given need (their requirements.txt); diffusers (with
# transformers, its pipelines), accelerate, ray, av and jax are tested if they are there. Without a folder its tests are skipped, visibly; with chromedriver the
# page of ComfyUI is opened too. The library is $VIDEO_VAE_LIBRARY, or target/release. `.ci/long integration` calls this.
set -euo pipefail

usage() { sed -n '5,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
python= comfyui= pack=
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case "$1" in
        --python) python=$(command -v "$2") || { echo "$2: no such program" >&2; exit 2; } ;;
        --comfyui) comfyui=$(cd "$2" && pwd) ;;
        --pack) pack=$(cd "$2" && pwd) ;;
        *) usage ;;
    esac
    shift 2
done
[ -n "$python" ] || usage
cd "$(dirname "$0")/.."

versions='
import importlib, sys
print("Python", sys.version.split()[0], end="")
for name in ("torch", "numpy", "diffusers", "transformers", "accelerate", "ray", "av", "jax"):
    try:
        module = importlib.import_module(name)
        print(f", {name} {module.__version__}", end="")
    except ImportError:
        print(f", no {name}", end="")
import torch
print(f"; {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "; no GPU")
'
date -u '+%Y-%m-%d'
"$python" -c "$versions"
[ -z "$comfyui" ] || echo "ComfyUI: $(sed -n 's/^__version__ = "\(.*\)"/version \1/p' "$comfyui/comfyui_version.py")"
[ -z "$pack" ] || echo "ComfyUI-SeedVR2_VideoUpscaler: $(sed -n 's/^__version__ = "\(.*\)"/version \1/p' "$pack/src/utils/constants.py")"

export PYTHONDONTWRITEBYTECODE=1
failed=0
tests() { # folder, then arguments of pytest
    echo "--- $1 ${*:2}"
    (cd "$1" && "$python" -m pytest -q -rs -p no:cacheprovider "${@:2}") || failed=1
}
tests host-examples/python tests
tests host-examples/comfyui tests
[ -z "$comfyui" ] || export COMFYUI=$comfyui
[ -z "$pack" ] || export SEEDVR2_PACK=$pack
# A process each, as one ComfyUI each.
tests host-examples/comfyui integration/test_comfyui.py
tests host-examples/comfyui integration/test_families.py -k "not wan22"
# ComfyUI takes this one at full size only: 10 GB of memory, and minutes.
tests host-examples/comfyui integration/test_families.py -k wan22
tests host-examples/comfyui integration/test_page.py
# That pack prints much. In a subshell, `failed` would be lost; pipefail brings it back.
shown='relative error|passed|failed|skipped|SKIPPED|^(FAILED|ERROR|E  |---)'
(failed=0; tests host-examples/comfyui -s integration/test_seedvr2.py; exit $failed) 2>&1 | grep -E "$shown" || failed=1
exit $failed
