#!/usr/bin/env python3
"""Compiles the kernels with NVRTC to the PTX that the library embeds, and checks how it assembles.

    pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-nvcc-cu12==12.9.86
    python compile.py            # writes ptx/<precision>/<kernel file>.ptx
    python compile.py --check    # compares ptx/ with the sources, and assembles it for every architecture
    python compile.py --table    # prints registers and shared memory of every kernel and architecture

The check fails if ptx/ is stale, if a kernel spills registers, or if ptxas serialises wgmma or ignores setmaxnreg.
"""
import argparse
import ctypes
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NVIDIA = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
# Preprocessor definitions that select the element type.
PRECISIONS = {"fp16": [], "bf16": ["-DVVAE_BF16"], "fp32": ["-DVVAE_FP32"]}
# Files that exist for some precisions only.
ONLY_FOR = {"conv_wgmma": ["fp16", "bf16"], "conv_wgmma_pair": ["fp16"], "attention_wgmma": ["fp16", "bf16"]}
# Files for one architecture only. All others are compiled for the first common one, and run on all later ones.
ARCHITECTURES = {"conv_wgmma": ["90a"], "conv_wgmma_pair": ["90a"], "attention_wgmma": ["90a"]}
COMMON_ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]
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
    """Runs ptxas. Returns (kernel, registers, static shared bytes) of each kernel, and a list of faults."""
    ptxas = NVIDIA / "cuda_nvcc/bin/ptxas"
    with tempfile.NamedTemporaryFile() as cubin:
        command = [ptxas, "-v", f"-arch=sm_{architecture}", path, "-o", cubin.name]
        run = subprocess.run(command, capture_output=True, text=True)
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
    return usage, faults


def ptx_path(name, precision):
    return HERE / "ptx" / precision / f"{name}.ptx"


def write(files):
    nvrtc = load_nvrtc()
    for name, precision in files:
        path = ptx_path(name, precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compile_ptx(nvrtc, name, PRECISIONS[precision]))
    print(f"{len(files)} files: written")


def check(files):
    nvrtc, problems = load_nvrtc(), []
    for name, precision in files:
        path = ptx_path(name, precision)
        if not path.exists() or path.read_bytes() != compile_ptx(nvrtc, name, PRECISIONS[precision]):
            problems.append(f"{precision}/{name}.ptx is stale; run compile.py")
            continue
        for architecture in architectures(name):
            problems += [f"{precision}: {fault}" for fault in assemble(path, architecture)[1]]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(files)} files: up to date, nothing spills")


def table(files):
    print("precision  arch    kernel              registers  static shared bytes")
    for name, precision in files:
        for architecture in architectures(name):
            for kernel, registers, shared in assemble(ptx_path(name, precision), architecture)[0]:
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
