#!/usr/bin/env bash
# Compiles the shaders to spirv/, or with --check compares. The first run builds the compiler, which takes minutes.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
exec cargo run -q --release --locked --manifest-path src/backend/vulkan/shaders/compile/Cargo.toml \
    --target-dir "${CARGO_TARGET_DIR:-target}/shaders" -- "$@"
