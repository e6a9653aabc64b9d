// Clips as files: binary PPM (P6), which most tools write, PAM (P7), which may have alpha, and raw bytes.
#pragma once

#include <filesystem>

#include "value.h"

namespace host {

// A folder of .ppm and .pam files in the order of their names, such a file with one or more pictures, or any other
// file as raw bytes, of which `raw` says channels, height and width.
Value read_frames(const std::filesystem::path &path, const Shape &raw);

// A .ppm or .pam file with all pictures, a .rgb file with raw bytes, or else a folder with a picture a frame.
void write_frames(const std::filesystem::path &path, const Value &clip);

// Opaque, if there is alpha.
Value test_pattern(const Shape &shape);

} // namespace host
