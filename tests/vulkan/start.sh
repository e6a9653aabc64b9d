#!/usr/bin/env bash
# start.sh LIBRARIES PROGRAM ARGUMENTS: runs a program with the loader and the C library of a folder.
set -euo pipefail
libraries=$1 program=$(readlink -f "$2")
shift 2
for folder in "$(dirname "$program")" "$(dirname "$program")/.."; do
    # Tests look beside the program that the system started, which is the loader.
    [ -e "$folder/libvideo_vae.so" ] && ln -sfn "$(readlink -f "$folder/libvideo_vae.so")" "$libraries/libvideo_vae.so" && break
done
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$program" "$@"
