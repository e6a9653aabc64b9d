"""The golden clip for host-examples/cpp/tests/golden.cpp: `golden.py put FOLDER` writes its input, `compare` checks."""

import array
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
IN = {"encode_video": "video", "decode_latent": "latent"}
OUT = {"encode_mean": "mean", "encode_logvar": "logvar", "decode_video": "decoded"}
MOST_ERROR = 1e-5  # root mean square, relative to that of what is right


def tensors(path: pathlib.Path) -> dict[str, bytes]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    assert all(entry["dtype"] == "F32" for entry in header.values())
    return {name: data[start:][slice(*entry["data_offsets"])] for name, entry in header.items()}


def error(found: bytes, right: bytes) -> float:
    assert len(found) == len(right), f"{len(found)} bytes, expected {len(right)}"
    found, right = array.array("f", found), array.array("f", right)
    return math.sqrt(sum((f - r) ** 2 for f, r in zip(found, right)) / sum(r * r for r in right))


def main(what: str, folder: pathlib.Path) -> int:
    clip = tensors(ROOT / "tests/golden/small-clip5.safetensors")
    if what == "put":
        for name, file in IN.items():
            (folder / f"{file}.f32").write_bytes(clip[name])
        return 0
    errors = {file: error((folder / f"{file}.f32").read_bytes(), clip[name]) for name, file in OUT.items()}
    print(", ".join(f"{file} {value:.1e}" for file, value in errors.items()))
    same = (folder / "streamed.f32").read_bytes() == (folder / "decoded.f32").read_bytes()
    print("the stream gives", "the same bits" if same else "other bits than decode")
    return 0 if same and max(errors.values()) <= MOST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], pathlib.Path(sys.argv[2])))
