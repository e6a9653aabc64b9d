#!/bin/sh
# Builds wrapper, sample and tests with mono's compiler, where there is no .NET SDK:
#     build.sh FOLDER                 for mono:       FOLDER/sample.exe, FOLDER/tests.exe
#     build.sh FOLDER FRAMEWORK       for .NET Core:  FOLDER/sample.dll, FOLDER/tests.dll
# FRAMEWORK is the runtime's shared/Microsoft.NETCore.App/VERSION, whose assemblies are compiled against.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
framework=${2:-}
mkdir -p "$out"
set --
extension=exe
if [ -n "$framework" ]; then
    extension=dll
    # 1702: two of the runtime's own assemblies refer to each other by older numbers.
    set -- -nostdlib -noconfig -nowarn:1702
    for name in System.Private.CoreLib System.Runtime System.Runtime.Extensions System.Console System.Linq \
        System.Collections System.Threading System.Memory System.Text.RegularExpressions System.Diagnostics.Process \
        System.ComponentModel.Primitives System.IO.FileSystem; do
        set -- "$@" "-r:$framework/$name.dll"
    done
    version=$(basename "$framework")
    for program in sample tests; do
        cat >"$out/$program.runtimeconfig.json" <<JSON
{
    "runtimeOptions": {
        "framework": { "name": "Microsoft.NETCore.App", "version": "$version" },
        "configProperties": { "System.Globalization.Invariant": true }
    }
}
JSON
    done
fi
mcs -unsafe -warnaserror "$@" -target:exe -out:"$out/sample.$extension" "$here"/VideoVae/*.cs "$here"/Sample/*.cs
mcs -unsafe -warnaserror "$@" -target:exe -out:"$out/tests.$extension" "$here"/VideoVae/*.cs "$here"/Tests/*.cs
