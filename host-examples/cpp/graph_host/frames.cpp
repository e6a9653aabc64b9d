#include "frames.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "interrupt.h"

namespace host {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void wrong(const fs::path &path, const std::string &why) {
    throw std::runtime_error(path.u8string() + " " + why);
}

std::ifstream open(const fs::path &path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) wrong(path, "cannot be read");
    return in;
}

// A number of a PPM's header, past white space and comments.
int64_t header_number(std::istream &in) {
    for (in >> std::ws; in.peek() == '#'; in >> std::ws) in.ignore(1 << 20, '\n');
    int64_t number = 0;
    in >> number;
    return in ? number : 0;
}

// Adds the pictures of one file to the clip; the first one gives the size.
void append_ppm(const fs::path &path, Value &clip) {
    std::ifstream in = open(path);
    while (in >> std::ws, in.peek() != EOF) {
        check_interrupt();
        char magic[2] = {};
        in.read(magic, 2);
        int64_t width = header_number(in), height = header_number(in), most = header_number(in);
        bool known = magic[0] == 'P' && magic[1] == '6' && most == 255 && width > 0 && height > 0;
        if (!known || width > 131072 || height > 131072) wrong(path, "is no binary PPM (P6) with 255 shades");
        in.get(); // exactly one white space before the pixels
        if (clip.shape[2] == 0) clip.shape = {1, 3, 0, height, width};
        if (clip.shape[3] != height || clip.shape[4] != width) {
            wrong(path, "is " + std::to_string(width) + " x " + std::to_string(height) + ", the clip " +
                            std::to_string(clip.shape[4]) + " x " + std::to_string(clip.shape[3]));
        }
        auto size = static_cast<std::size_t>(width * height * 3), before = clip.bytes.size();
        clip.bytes.resize(before + size);
        in.read(reinterpret_cast<char *>(clip.bytes.data() + before), static_cast<std::streamsize>(size));
        if (!in) wrong(path, "ends in the middle of a picture");
        clip.shape[2]++;
    }
}

std::vector<fs::path> ppm_files(const fs::path &folder) {
    std::vector<fs::path> files;
    for (const auto &entry : fs::directory_iterator(folder)) {
        if (entry.path().extension() == ".ppm") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
}

Value read_raw(const fs::path &path, int64_t width, int64_t height) {
    if (width <= 0 || height <= 0) wrong(path, "is taken for raw RGB, so its node needs \"width\" and \"height\"");
    auto frame = width * height * 3, size = static_cast<int64_t>(fs::file_size(path));
    if (size == 0 || size % frame != 0) {
        wrong(path, "has " + std::to_string(size) + " bytes, which is no whole number of frames of " +
                        std::to_string(width) + " x " + std::to_string(height) + " x 3");
    }
    Value clip = Value::frames(size / frame, height, width);
    open(path).read(reinterpret_cast<char *>(clip.bytes.data()), size);
    return clip;
}

void write(std::ofstream &out, const Value &clip, int64_t t, bool with_header) {
    check_interrupt();
    int64_t height = clip.shape[3], width = clip.shape[4], frame = height * width * 3;
    if (with_header) out << "P6\n" << width << " " << height << "\n255\n";
    out.write(reinterpret_cast<const char *>(clip.bytes.data() + t * frame), frame);
}

std::ofstream create(const fs::path &path) {
    std::ofstream out(path, std::ios::binary);
    if (!out) wrong(path, "cannot be written");
    return out;
}

void close(std::ofstream &out, const fs::path &path) {
    out.close();
    if (!out) wrong(path, "could not be written whole; is the disk full?");
}

} // namespace

Value read_frames(const fs::path &path, int64_t width, int64_t height) {
    if (!fs::exists(path)) wrong(path, "is not there");
    bool folder = fs::is_directory(path);
    if (!folder && path.extension() != ".ppm") return read_raw(path, width, height);
    Value clip = Value::frames(0, 0, 0);
    for (const auto &file : folder ? ppm_files(path) : std::vector{path}) append_ppm(file, clip);
    if (clip.shape[2] == 0) wrong(path, folder ? "has no .ppm files" : "has no picture");
    int64_t row = clip.shape[4] * 3, frame = clip.shape[3] * row;
    clip.strides = Shape{clip.shape[2] * frame, 1, frame, row, 3};
    clip.clip = clip.shape;
    return clip;
}

void write_frames(const fs::path &path, const Value &clip) {
    if (path.has_parent_path()) fs::create_directories(path.parent_path());
    bool ppm = path.extension() == ".ppm", raw = path.extension() == ".rgb";
    if (ppm || raw) {
        std::ofstream out = create(path);
        for (int64_t t = 0; t < clip.shape[2]; t++) write(out, clip, t, ppm);
        return close(out, path);
    }
    fs::create_directories(path);
    for (int64_t t = 0; t < clip.shape[2]; t++) {
        char name[32];
        std::snprintf(name, sizeof name, "frame_%06lld.ppm", static_cast<long long>(t));
        std::ofstream out = create(path / name);
        write(out, clip, t, true);
        close(out, path / name);
    }
}

Value test_pattern(int64_t frames, int64_t width, int64_t height) {
    if (frames < 1 || width < 1 || height < 1) throw std::runtime_error("test_pattern: sizes have to be at least 1");
    Value clip = Value::frames(frames, height, width);
    uint8_t *pixel = clip.bytes.data();
    for (int64_t t = 0; t < frames; t++) {
        check_interrupt();
        int64_t x0 = width / 4 + t * 4, y0 = height / 2, radius = std::min(width, height) / 4;
        for (int64_t y = 0; y < height; y++) {
            for (int64_t x = 0; x < width; x++, pixel += 3) {
                bool inside = (x - x0) * (x - x0) + (y - y0) * (y - y0) < radius * radius;
                pixel[0] = inside ? 230 : uint8_t(x * 255 / width);
                pixel[1] = inside ? 90 : uint8_t(y * 255 / height);
                pixel[2] = inside ? 40 : 128;
            }
        }
    }
    return clip;
}

} // namespace host
