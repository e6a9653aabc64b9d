#!/usr/bin/env python3
"""Compiles the kernels with NVRTC to the PTX that the library embeds, and looks at what each architecture makes of it.

    pip install nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-nvcc-cu12==12.9.86
    python compile.py           # writes ptx/, a folder for each precision
    python compile.py --check   # compares ptx/ with what the sources give, and assembles it for every architecture

The check fails when ptx/ is stale, or when a kernel needs more registers than there are.
"""
import ctypes
import glob
import os
import re
import subprocess
import sys
import sysconfig
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
PTX = os.path.join(HERE, "ptx")
NVIDIA = os.path.join(sysconfig.get_paths()["purelib"], "nvidia")
# What tells the sources their element type.
PRECISIONS = {"fp16": [], "bf16": ["-DVVAE_BF16"], "fp32": ["-DVVAE_FP32"]}
# Kernels that some precisions do without.
ONLY_FOR = {"conv_wgmma": ["fp16", "bf16"]}
# Kernels that use instructions of one architecture alone; all others run from compute capability 8.0 on.
ARCHITECTURES = {"conv_wgmma": ["90a"]}
COMMON = ["80", "86", "89", "90", "100", "120"]
# Most kernels live in registers: spilling would go unnoticed but for the time it takes.
MUST_NOT_SPILL = re.compile("conv|attention|norm_silu|copy")
# And so would products that wait for each other, or registers that are not handed on.
LOST = re.compile("serialized|setmaxnreg")


def compile_ptx(nvrtc, name, definitions):
    architecture = ARCHITECTURES.get(name, COMMON)[0]
    with open(f"{HERE}/{name}.cu", "rb") as file:
        source = file.read()
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{name}.cu".encode(), 0, None, None):
        sys.exit("NVRTC does not start")
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
    return text.value  # without the NUL at its end, which newer assemblers refuse


def assemble(path, architecture, folder):
    """Kernels that spill or lose what they are written for, with the assembler's words."""
    ptxas = f"{NVIDIA}/cuda_nvcc/bin/ptxas"
    command = [ptxas, "-v", f"-arch=sm_{architecture}", path, "-o", os.path.join(folder, "cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    faults, kernel = [], ""
    for line in run.stderr.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = entry[1]
        elif LOST.search(line):
            faults.append(f"sm_{architecture}: {line.strip()}")
        elif "bytes spill stores" in line and "0 bytes spill stores, 0 bytes spill loads" not in line:
            if MUST_NOT_SPILL.search(kernel):
                faults.append(f"{kernel} on sm_{architecture}: {line.strip()}")
    return faults


def main():
    check = sys.argv[1:] == ["--check"]
    nvrtc = ctypes.CDLL(glob.glob(f"{NVIDIA}/cuda_nvrtc/lib/libnvrtc.so.*")[0])
    names = sorted(os.path.basename(path)[:-3] for path in glob.glob(f"{HERE}/*.cu"))
    works = [(name, precision) for precision in PRECISIONS for name in names if precision in ONLY_FOR.get(name, PRECISIONS)]
    problems = []
    for name, precision in works:
        path, text = f"{PTX}/{precision}/{name}.ptx", compile_ptx(nvrtc, name, PRECISIONS[precision])
        if not check:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(text)
            continue
        if not os.path.exists(path) or open(path, "rb").read() != text:
            problems.append(f"{precision}/{name}.ptx is stale; run compile.py")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for architecture in ARCHITECTURES.get(name, COMMON):
                problems += [f"{precision}: {why}" for why in assemble(path, architecture, folder)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(works)} files of kernels: {'as committed, and nothing spills' if check else 'written'}")


if __name__ == "__main__":
    main()
