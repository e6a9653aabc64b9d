// Clips as files: binary PPM (P6), which most tools write, and raw RGB bytes.
#pragma once

#include <filesystem>

#include "value.h"

namespace host {

// A folder of .ppm files in the order of their names, a .ppm file with one or more pictures, or any other file as raw
// RGB frames of the given size.
Value read_frames(const std::filesystem::path &path, int64_t width, int64_t height);

// A .ppm file with all pictures, a .rgb file with raw bytes, or else a folder with a .ppm a frame.
void write_frames(const std::filesystem::path &path, const Value &clip);

Value test_pattern(int64_t frames, int64_t width, int64_t height);

} // namespace host
