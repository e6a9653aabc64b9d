#!/usr/bin/env python3
"""Writes VideoVae/Native.cs from include/video_vae.h, the one true source of the ABI.

    generate.py            writes the file
    generate.py --check    fails if the file is not what the header says; tests/host/csharp.rs runs this

The header is made by a machine (cbindgen), so its form can be relied on: one declaration a line, comments of `//` before
what they are about. Whatever this program does not understand is an error, never left out.
"""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE.parent.parent / "include" / "video_vae.h"
OUTPUT = HERE / "VideoVae" / "Native.cs"

NUMBERS = {
    "int32_t": "int", "uint32_t": "uint", "int64_t": "long", "uint64_t": "ulong", "double": "double", "float": "float",
    "char": "byte", "void": "void",
}
# Opaque types become safe handles, which count the calls that use them: nothing is freed under a running call. Where a
# call ends the handle, or takes NULL for it, it is the plain pointer.
HANDLES = {"vvae": "VaeHandle", "vvae_stream": "StreamHandle"}
PLAIN_HANDLES = {"vvae_free", "vvae_stream_close", "vvae_error"}
KEYWORDS = {"out", "in", "ref", "params", "object", "string", "lock", "fixed", "event", "base"}


def fail(line, why):
    sys.exit(f"{HEADER}: {why}: {line.strip()}")


class Header:
    """The declarations, in the order of the file, each with its comment."""

    def __init__(self, text):
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        text = re.sub(r"#ifdef __cplusplus.*?#endif[^\n]*", "", text, flags=re.S)
        self.constants, self.callbacks, self.structs, self.functions = [], [], [], []
        self.opaque = set()
        comment, lines = [], iter(text.splitlines())
        for line in lines:
            line = line.strip()
            if line.startswith("//"):
                comment.append(line[2:].strip())
            elif not line:
                # A comment that nothing follows is about the section: it goes with no declaration.
                comment = []
            else:
                self.declaration(line, comment, lines)
                comment = []

    def declaration(self, line, comment, lines):
        if re.match(r"#(ifndef|include|endif)\b", line) or line == "#define VIDEO_VAE_H":
            return
        if match := re.fullmatch(r"#define (VVAE_\w+) (.+)", line):
            self.constants.append((*match.groups(), comment))
        elif match := re.fullmatch(r"typedef struct (\w+) (\w+);", line):
            if match[1] not in HANDLES:
                fail(line, "an opaque type without a safe handle")
            self.opaque.add(match[1])
        elif match := re.fullmatch(r"typedef (.+?)\(\*(\w+)\)\((.*)\);", line):
            self.callbacks.append((match[2], match[1].strip(), parameters(match[3]), comment))
        elif line == "typedef struct {":
            self.struct(lines, comment)
        elif match := re.fullmatch(r"(.+?)(vvae_\w+)\((.*)\);", line):
            self.functions.append((match[2], match[1].strip(), parameters(match[3]), comment))
        else:
            fail(line, "not understood")

    def struct(self, lines, comment):
        fields, about = [], []
        for line in lines:
            line = line.strip()
            if line.startswith("//"):
                about.append(line[2:].strip())
            elif match := re.fullmatch(r"\} (\w+);", line):
                self.structs.append((match[1], fields, comment))
                return
            elif match := re.fullmatch(r"(.+?)(\w+)(?:\[(\d+)\])?;", line):
                fields.append((match[2], match[1].strip(), match[3], about))
                about = []
            else:
                fail(line, "not understood")


def parameters(text):
    if text == "void":
        return []
    found = [re.fullmatch(r"(.+?)(\w+)", part.strip()) for part in text.split(",")]
    return [(match[2], match[1].strip()) for match in found]


class Writer:
    def __init__(self, header):
        self.header, self.lines = header, []
        self.struct_names = {name for name, _, _ in header.structs}
        self.callback_names = {name for name, _, _, _ in header.callbacks}

    def put(self, depth, text=""):
        self.lines.append("    " * depth + text if text else "")

    def summary(self, depth, comment):
        text = [line.replace("&", "&amp;").replace("<", "&lt;") for line in comment]
        if text:
            self.put(depth, "/// <summary>")
            for line in text:
                self.put(depth, f"/// {line}".rstrip())
            self.put(depth, "/// </summary>")

    def type(self, c, plain_handle=True):
        """A C type as C# has it."""
        words = c.replace("const", "").replace("*", " * ").split()
        base, stars = words[0], words.count("*")
        if len(words) != 1 + stars:
            fail(c, "a type that is not understood")
        if base in HANDLES:
            if stars == 1:
                return "IntPtr" if plain_handle else HANDLES[base]
            if stars == 2 and not plain_handle:
                return "out " + HANDLES[base]
        elif base in self.callback_names and stars == 0:
            return "IntPtr"
        elif base in NUMBERS:
            return NUMBERS[base] + "*" * stars
        elif base in self.struct_names and stars == 1:
            return base + "*"
        fail(c, "a type that is not understood")

    def arguments(self, parameters, plain_handles):
        name = lambda n: "@" + n if n in KEYWORDS else n
        return ", ".join(f"{self.type(c, plain_handles)} {name(n)}" for n, c in parameters)

    def write(self):
        self.put(0, "// Generated by generate.py from include/video_vae.h. To change it, change that and run generate.py.")
        self.put(0, "// The names are the header's, and so is what is said about them.")
        self.put(0)
        for name in ["System", "System.Runtime.InteropServices"]:
            self.put(0, f"using {name};")
        self.put(0)
        self.put(0, "namespace VideoVae")
        self.put(0, "{")
        self.put(1, "internal static unsafe class Native")
        self.put(1, "{")
        self.put(2, "/// <summary>libvideo_vae.so, video_vae.dll or libvideo_vae.dylib, by the rules of the system.</summary>")
        self.put(2, 'public const string Library = "video_vae";')
        for name, value, comment in self.header.constants:
            self.put(0)
            self.summary(2, comment)
            self.put(2, f"public const int {name} = {value};")
        for name, result, parameters, comment in self.header.callbacks:
            self.put(0)
            self.summary(2, comment)
            self.put(2, "[UnmanagedFunctionPointer(CallingConvention.Cdecl)]")
            self.put(2, f"public delegate {self.type(result)} {name}({self.arguments(parameters, True)});")
        for struct in self.header.structs:
            self.put(0)
            self.struct(*struct)
        for name, result, parameters, comment in self.header.functions:
            self.put(0)
            self.summary(2, comment)
            self.put(2, "[DllImport(Library, CallingConvention = CallingConvention.Cdecl, ExactSpelling = true)]")
            arguments = self.arguments(parameters, name in PLAIN_HANDLES)
            self.put(2, f"public static extern {self.type(result)} {name}({arguments});")
        self.put(1, "}")
        self.put(0, "}")
        return "\n".join(self.lines) + "\n"

    def struct(self, name, fields, comment):
        self.summary(2, comment)
        self.put(2, "[StructLayout(LayoutKind.Sequential)]")
        self.put(2, f"public struct {name}")
        self.put(2, "{")
        for field, c, length, about in fields:
            self.summary(3, about)
            kind = "fixed " + self.type(c) if length else self.type(c)
            note = f" // {c}" if kind == "IntPtr" else ""
            self.put(3, f"public {kind} {field}{f'[{length}]' if length else ''};{note}")
        self.put(2, "}")


def main():
    fresh = Writer(Header(HEADER.read_text(encoding="utf-8"))).write()
    if sys.argv[1:] == ["--check"]:
        if OUTPUT.read_text(encoding="utf-8") != fresh:
            sys.exit(f"{OUTPUT} is not what the header says. To write it anew, run: {HERE / 'generate.py'}")
    elif not sys.argv[1:]:
        OUTPUT.write_text(fresh, encoding="utf-8")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
