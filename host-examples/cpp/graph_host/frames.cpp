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

struct Header {
    int64_t channels, height, width;
};

// Of a PAM, behind "P7": lines of a word and a number.
Header pam_header(std::istream &in) {
    Header header{0, 0, 0};
    int64_t most = 0;
    for (std::string word; in >> word && word != "ENDHDR";) {
        if (word == "WIDTH") header.width = header_number(in);
        if (word == "HEIGHT") header.height = header_number(in);
        if (word == "DEPTH") header.channels = header_number(in);
        if (word == "MAXVAL") most = header_number(in);
        in.ignore(1 << 20, '\n');
    }
    in.get(); // the end of ENDHDR's line
    return most == 255 ? header : Header{0, 0, 0};
}

Header ppm_header(std::istream &in) {
    int64_t width = header_number(in), height = header_number(in), most = header_number(in);
    in.get(); // exactly one white space before the pixels
    return most == 255 ? Header{3, height, width} : Header{0, 0, 0};
}

// Adds the pictures of one file to the clip; the first one gives the size.
void append_pictures(const fs::path &path, Value &clip) {
    std::ifstream in = open(path);
    while (in >> std::ws, in.peek() != EOF) {
        check_interrupt();
        char magic[2] = {};
        in.read(magic, 2);
        bool ppm = magic[0] == 'P' && magic[1] == '6', pam = magic[0] == 'P' && magic[1] == '7';
        auto [channels, height, width] = ppm ? ppm_header(in) : pam ? pam_header(in) : Header{0, 0, 0};
        bool known = channels >= 3 && channels <= 4 && width > 0 && height > 0;
        if (!known || width > 131072 || height > 131072) {
            wrong(path, "is no binary PPM (P6) or PAM (P7) with 255 shades and 3 or 4 channels");
        }
        if (clip.shape[2] == 0) clip.shape = {1, channels, 0, height, width};
        if (clip.shape[1] != channels || clip.shape[3] != height || clip.shape[4] != width) {
            auto words = [](int64_t w, int64_t h, int64_t c) {
                return std::to_string(w) + " x " + std::to_string(h) + " of " + std::to_string(c) + " channels";
            };
            wrong(path, "is " + words(width, height, channels) + ", the clip " +
                            words(clip.shape[4], clip.shape[3], clip.shape[1]));
        }
        auto size = static_cast<std::size_t>(width * height * channels), before = clip.bytes.size();
        clip.bytes.resize(before + size);
        in.read(reinterpret_cast<char *>(clip.bytes.data() + before), static_cast<std::streamsize>(size));
        if (!in) wrong(path, "ends in the middle of a picture");
        clip.shape[2]++;
    }
}

bool is_picture(const fs::path &path) { return path.extension() == ".ppm" || path.extension() == ".pam"; }

std::vector<fs::path> pictures(const fs::path &folder) {
    std::vector<fs::path> files;
    for (const auto &entry : fs::directory_iterator(folder)) {
        if (is_picture(entry.path())) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
}

Value read_raw(const fs::path &path, const Shape &raw) {
    auto [batch, channels, count, height, width] = raw;
    if (width <= 0 || height <= 0) wrong(path, "is taken for raw bytes, so its node needs \"width\" and \"height\"");
    auto frame = width * height * channels, size = static_cast<int64_t>(fs::file_size(path));
    if (size == 0 || size % frame != 0) {
        wrong(path, "has " + std::to_string(size) + " bytes, which is no whole number of frames of " +
                        std::to_string(width) + " x " + std::to_string(height) + " x " + std::to_string(channels));
    }
    Value clip = Value::frames({1, channels, size / frame, height, width});
    open(path).read(reinterpret_cast<char *>(clip.bytes.data()), size);
    return clip;
}

void write(std::ofstream &out, const Value &clip, int64_t t, bool with_header) {
    check_interrupt();
    int64_t channels = clip.shape[1], height = clip.shape[3], width = clip.shape[4], frame = height * width * channels;
    if (with_header && channels == 3) out << "P6\n" << width << " " << height << "\n255\n";
    if (with_header && channels != 3) {
        out << "P7\nWIDTH " << width << "\nHEIGHT " << height << "\nDEPTH " << channels
            << "\nMAXVAL 255\nTUPLTYPE RGB_ALPHA\nENDHDR\n";
    }
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

Value read_frames(const fs::path &path, const Shape &raw) {
    if (!fs::exists(path)) wrong(path, "is not there");
    bool folder = fs::is_directory(path);
    if (!folder && !is_picture(path)) return read_raw(path, raw);
    Value clip;
    clip.dtype = VVAE_DTYPE_U8;
    for (const auto &file : folder ? pictures(path) : std::vector{path}) append_pictures(file, clip);
    if (clip.shape[2] == 0) wrong(path, folder ? "has no .ppm or .pam files" : "has no picture");
    clip.interleave();
    clip.clip = clip.shape;
    return clip;
}

void write_frames(const fs::path &path, const Value &clip) {
    const char *extension = clip.shape[1] == 3 ? ".ppm" : ".pam";
    if (is_picture(path) && path.extension() != extension) {
        std::string channels = std::to_string(clip.shape[1]);
        wrong(path, "is for another number of channels than " + channels + "; name it " + extension);
    }
    if (path.has_parent_path()) fs::create_directories(path.parent_path());
    if (is_picture(path) || path.extension() == ".rgb") {
        std::ofstream out = create(path);
        for (int64_t t = 0; t < clip.shape[2]; t++) write(out, clip, t, is_picture(path));
        return close(out, path);
    }
    fs::create_directories(path);
    for (int64_t t = 0; t < clip.shape[2]; t++) {
        char name[40];
        std::snprintf(name, sizeof name, "frame_%06lld%s", static_cast<long long>(t), extension);
        std::ofstream out = create(path / name);
        write(out, clip, t, true);
        close(out, path / name);
    }
}

Value test_pattern(const Shape &shape) {
    auto [batch, channels, frames, height, width] = shape;
    if (frames < 1 || width < 1 || height < 1) throw std::runtime_error("test_pattern: sizes have to be at least 1");
    Value clip = Value::frames(shape);
    std::fill(clip.bytes.begin(), clip.bytes.end(), uint8_t(255));
    uint8_t *pixel = clip.bytes.data();
    for (int64_t t = 0; t < frames; t++) {
        check_interrupt();
        int64_t x0 = width / 4 + t * 4, y0 = height / 2, radius = std::min(width, height) / 4;
        for (int64_t y = 0; y < height; y++) {
            for (int64_t x = 0; x < width; x++, pixel += channels) {
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
