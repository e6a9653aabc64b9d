// Encodes and decodes raw floats through video_vae.hpp, whole and as a stream. tests/host_cpp.rs compares the results
// with those of the authors' implementation.
//
//     golden WEIGHTS FOLDER FRAMES HEIGHT WIDTH
//
// reads video.f32 and latent.f32, and writes mean.f32, logvar.f32, decoded.f32 and streamed.f32 there.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "video_vae.hpp"

using video_vae::Shape;
using video_vae::Tensor;

static std::size_t elements(const Shape &s) { return std::size_t(s[0] * s[1] * s[2] * s[3] * s[4]); }

static std::vector<float> read(const std::string &path, std::size_t count) {
    std::vector<float> values(count);
    std::ifstream in(path, std::ios::binary);
    in.read(reinterpret_cast<char *>(values.data()), std::streamsize(count * 4));
    if (!in || in.peek() != EOF) throw std::runtime_error(path + " has not the expected size");
    return values;
}

static void write(const std::string &path, const std::vector<float> &values) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char *>(values.data()), std::streamsize(values.size() * 4));
}

// The clip in pieces of two frames, each pulled into its place in the whole.
static std::vector<float> stream(video_vae::Vae &vae, const Tensor &latent, const Shape &shape) {
    std::vector<float> out(elements(shape));
    auto stream = vae.stream("decode", latent.shape);
    for (int64_t pushed = 0; pushed < latent.shape[2]; pushed += stream.push(latent)) {
    }
    stream.finish();
    int64_t plane = shape[3] * shape[4];
    Shape strides{0, shape[2] * plane, plane, shape[4], 1};
    for (int64_t at = 0;;) {
        Shape room{1, shape[1], std::min<int64_t>(2, std::max<int64_t>(1, shape[2] - at)), shape[3], shape[4]};
        std::vector<float> rest(elements(room));
        bool full = at == shape[2]; // one more pull, to hear that this is the end
        auto pulled = stream.pull(full ? Tensor::of(rest.data(), room) : Tensor::of(&out[at * plane], room, strides));
        at += pulled.frames;
        if (pulled.status == VVAE_END) return at == shape[2] ? out : std::vector<float>();
        if (pulled.status != VVAE_OK) throw std::runtime_error("the stream wants more than there is");
    }
}

int main(int argc, char **argv) try {
    if (argc != 6) return 2;
    video_vae::Options options;
    options.device = "cpu";
    video_vae::Vae vae(argv[1], options);
    auto model = vae.model();
    std::string folder = std::string(argv[2]) + "/";
    int64_t frames = std::atoll(argv[3]), height = std::atoll(argv[4]), width = std::atoll(argv[5]);
    Shape pixels{1, 3, frames, height, width};
    Shape latents{1, model.latent_channels, 1 + (frames - 1) / model.time_scale, height / model.spatial_scale,
                  width / model.spatial_scale};

    auto video = read(folder + "video.f32", elements(pixels)), latent = read(folder + "latent.f32", elements(latents));
    std::vector<float> mean(elements(latents)), logvar(mean.size()), decoded(elements(pixels));
    video_vae::Run run;
    run.logvar = Tensor::of(logvar.data(), latents);
    vae.encode(Tensor::of(video.data(), pixels), Tensor::of(mean.data(), latents), run);
    vae.decode(Tensor::of(latent.data(), latents), Tensor::of(decoded.data(), pixels));
    write(folder + "mean.f32", mean);
    write(folder + "logvar.f32", logvar);
    write(folder + "decoded.f32", decoded);
    write(folder + "streamed.f32", stream(vae, Tensor::of(latent.data(), latents), pixels));
} catch (const std::exception &error) {
    std::fprintf(stderr, "golden: %s\n", error.what());
    return 1;
}
