#!/usr/bin/env python3
"""Compiles the kernels with NVRTC to PTX and with ptxas to machine code, and checks both.

    pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-nvcc-cu12==12.9.86
    python compile.py            # writes ptx/<precision>/<kernel file>.ptx and bundles/<precision>/<kernel file>.bundle
    python compile.py --check    # compares both with the sources, and assembles for every architecture
    python compile.py --table    # prints registers and shared memory of every kernel and architecture

The library embeds bundles: PTX and machine code of a module, compressed. The PTX as text is for readers and tests.
The check fails if a file is stale, if a kernel spills registers, or if ptxas serialises wgmma or ignores setmaxnreg.
"""
import argparse
import ctypes
import os
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
NVIDIA = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
# Preprocessor definitions that select the element type.
PRECISIONS = {"fp16": [], "bf16": ["-DVVAE_BF16"], "fp32": ["-DVVAE_FP32"]}
# Files that exist for some precisions only.
TWO_BYTES = ["conv_wgmma", "conv_wgmma_columns", "conv_wgmma_pair", "conv_mma_pair", "attention_wgmma"]
ONLY_FOR = {name: ["fp16", "bf16"] for name in TWO_BYTES}
# Files for one architecture only. All others are compiled for the first common one, and run on all later ones.
HOPPER = ["conv_wgmma", "conv_wgmma_columns", "conv_wgmma_pair", "attention_wgmma"]
ARCHITECTURES = {name: ["90a"] for name in HOPPER}
COMMON_ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]
# Assembled to be checked only: such GPUs get the PTX.
NOT_EMBEDDED = ["100"]
# An entry of a bundle: its architecture (86 for 8.6, 0 for PTX), its bytes, and those of the zlib stream that follows.
BUNDLE_ENTRY = struct.Struct("<3I")
# The oldest version of PTX that has our instructions, so that drivers from CUDA 12.0 on take it. NVRTC writes its own.
PTX_VERSION = b".version 8.0"
# A hint of NVRTC that needs a newer version. The machine code is the same without it.
NEWER_HINT = re.compile(rb'^\s*\.pragma "used_bytes_mask \w+";\n', re.MULTILINE)
# ptxas only informs about these, but the products of a warpgroup then no longer overlap.
PERFORMANCE_LOSS = re.compile("serialized|setmaxnreg")


def architectures(name):
    return ARCHITECTURES.get(name, COMMON_ARCHITECTURES)


def load_nvrtc():
    libraries = list(NVIDIA.glob("cuda_nvrtc/lib/libnvrtc.so.*"))
    if not libraries:
        sys.exit(__doc__)
    return ctypes.CDLL(str(libraries[0]))


def compile_ptx(nvrtc, name, definitions):
    source = (HERE / f"{name}.cu").read_bytes()
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{name}.cu".encode(), 0, None, None):
        sys.exit("NVRTC does not start")
    architecture = architectures(name)[0]
    options = [f"--gpu-architecture=compute_{architecture}", "--std=c++17", f"--include-path={HERE}", *definitions]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status:
        sys.exit(f"{name}.cu: {log.value.decode()}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    ptx = re.sub(rb"^\.version \S+", PTX_VERSION, text.value, count=1, flags=re.MULTILINE)
    return NEWER_HINT.sub(b"", ptx)  # without the final NUL, which newer assemblers refuse


def assemble(path, architecture):
    """Runs ptxas. Returns the machine code, (kernel, registers, static shared bytes) of each kernel, and faults."""
    ptxas = NVIDIA / "cuda_nvcc/bin/ptxas"
    with tempfile.NamedTemporaryFile() as cubin:
        command = [ptxas, "-v", f"-arch=sm_{architecture}", path, "-o", cubin.name]
        run = subprocess.run(command, capture_output=True, text=True)
        code = cubin.read()
    if run.returncode:
        sys.exit(run.stderr)
    usage, faults, kernel = [], [], ""
    for line in run.stderr.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = entry[1]
        elif PERFORMANCE_LOSS.search(line):
            faults.append(f"sm_{architecture}: {line.strip()}")
        elif spills := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if spills.groups() != ("0", "0"):
                faults.append(f"{kernel} on sm_{architecture}: {line.strip()}")
        elif registers := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            usage.append((kernel, registers[1], shared[1] if shared else "0"))
    return code, usage, faults


def ptx_path(name, precision):
    return HERE / "ptx" / precision / f"{name}.ptx"


def bundle_path(name, precision):
    return HERE / "bundles" / precision / f"{name}.bundle"


def bundle_entries(ptx, codes):
    """What a bundle holds, by the number of the architecture: the PTX, and machine code by architecture."""
    embedded = {a: code for a, code in codes.items() if a not in NOT_EMBEDDED}
    return {0: ptx} | {int(re.match(r"\d+", a)[0]): code for a, code in embedded.items()}


def pack(entries):
    packed = ((number, data, zlib.compress(data, 9)) for number, data in entries.items())
    return b"".join(BUNDLE_ENTRY.pack(number, len(data), len(small)) + small for number, data, small in packed)


def unpack(bundle):
    entries, at = {}, 0
    while at < len(bundle):
        number, _, small = BUNDLE_ENTRY.unpack_from(bundle, at)
        at += BUNDLE_ENTRY.size + small
        entries[number] = zlib.decompress(bundle[at - small : at])
    return entries


def holds(path, entries):
    """Compares what was compressed: the compressed bytes depend on the version of zlib."""
    return path.exists() and unpack(path.read_bytes()) == entries


def on_all_cores(work, files):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda file: work(*file), files))


def write(files):
    nvrtc = load_nvrtc()

    def write_one(name, precision):
        path, bundle = ptx_path(name, precision), bundle_path(name, precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        bundle.parent.mkdir(parents=True, exist_ok=True)
        ptx = compile_ptx(nvrtc, name, PRECISIONS[precision])
        path.write_bytes(ptx)
        entries = bundle_entries(ptx, {a: assemble(path, a)[0] for a in architectures(name) if a not in NOT_EMBEDDED})
        if not holds(bundle, entries):
            bundle.write_bytes(pack(entries))

    on_all_cores(write_one, files)
    print(f"{len(files)} files: written")


def check(files):
    nvrtc = load_nvrtc()

    def problems_of(name, precision):
        path = ptx_path(name, precision)
        if not path.exists() or path.read_bytes() != compile_ptx(nvrtc, name, PRECISIONS[precision]):
            return [f"{precision}/{name}.ptx is stale; run compile.py"]
        assembled = {architecture: assemble(path, architecture) for architecture in architectures(name)}
        codes = {architecture: code for architecture, (code, _, _) in assembled.items()}
        problems = [f"{precision}: {fault}" for _, _, faults in assembled.values() for fault in faults]
        if not holds(bundle_path(name, precision), bundle_entries(path.read_bytes(), codes)):
            problems.append(f"{precision}/{name}.bundle is stale; run compile.py")
        return problems

    problems = sum(on_all_cores(problems_of, files), [])
    committed = {path for kind in ("ptx", "bundles") for path in (HERE / kind).glob("*/*")}
    expected = {path(*file) for file in files for path in (ptx_path, bundle_path)}
    problems += [f"{path.relative_to(HERE)} has no source; delete it" for path in sorted(committed - expected)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(files)} files: up to date, nothing spills")


def table(files):
    print("precision  arch    kernel              registers  static shared bytes")
    for name, precision in files:
        for architecture in architectures(name):
            for kernel, registers, shared in assemble(ptx_path(name, precision), architecture)[1]:
                print(f"{precision:9}  sm_{architecture:4} {kernel:20}{registers:>9}  {shared:>19}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", dest="run", action="store_const", const=check, default=write)
    mode.add_argument("--table", dest="run", action="store_const", const=table)
    names = sorted(path.stem for path in HERE.glob("*.cu"))
    files = [(name, p) for p in PRECISIONS for name in names if p in ONLY_FOR.get(name, PRECISIONS)]
    parser.parse_args().run(files)


if __name__ == "__main__":
    main()
