#!/bin/sh
# VideoVae.dll for .NET Standard 2.1, with mono's compiler, where there is no .NET SDK:  assembly.sh FOLDER FRAMEWORK
# FRAMEWORK is a .NET Core runtime's shared/Microsoft.NETCore.App/VERSION, whose assemblies are compiled against.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
csharp=$here/../../host-examples/csharp
out=$1 framework=$2
mkdir -p "$out/parts"
set --
for name in System.Private.CoreLib System.Runtime System.Runtime.Extensions System.Linq System.Collections System.Threading \
    System.Memory; do
    set -- "$@" "-r:$framework/$name.dll"
done
mcs -unsafe -optimize -warnaserror -nowarn:1702 -nostdlib -noconfig "$@" -target:library -out:"$out/parts/VideoVae.dll" \
    "$csharp"/VideoVae/*.cs
# mcs follows type forwards to the assembly that implements a type; a portable assembly names netstandard in its place.
cecil=/usr/lib/mono-cecil/Mono.Cecil.dll
cp "$cecil" "$out/parts"
mcs -r:"$cecil" -out:"$out/parts/retarget.exe" "$here/Retarget.cs"
mono "$out/parts/retarget.exe" "$out/parts/VideoVae.dll" "$out/VideoVae.dll"
