// A clip through the autoencoder and back, on video_vae.hpp: what a program that links the library looks like.
//
//     roundtrip CHECKPOINT [frames height width]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "video_vae.hpp"

using video_vae::Tensor;

// A gradient that drifts, opaque where a model has alpha.
static std::vector<uint8_t> make_clip(int64_t frames, int64_t height, int64_t width, int64_t channels) {
    std::vector<uint8_t> pixels;
    for (int64_t t = 0; t < frames; t++)
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++)
                for (int64_t c = 0; c < channels; c++) {
                    int64_t values[] = {255 * x / width, 255 * y / height, 128 + 8 * t};
                    pixels.push_back(c < 3 ? uint8_t(values[c]) : 255);
                }
    return pixels;
}

static double psnr(const std::vector<uint8_t> &a, const std::vector<uint8_t> &b) {
    double squares = 0;
    for (std::size_t i = 0; i < a.size(); i++) squares += (a[i] - b[i]) * (a[i] - b[i]);
    return 10 * std::log10(255.0 * 255.0 * double(a.size()) / squares);
}

// What a host needs to know of a model whose family it does not.
static void describe(const vvae_model_desc &model) {
    std::printf("%s: %u pixel channels, %u latent channels, 1 latent pixel for %u x %u, 1 latent frame for %u\n",
                model.family, model.pixel_channels, model.latent_channels, model.spatial_scale, model.spatial_scale,
                model.time_scale);
    if (!model.latents_known) {
        std::printf("its diffusion model is not known; it may be one of: %s\n", model.latent_formats);
        return;
    }
    const char *reader = *model.latent_format ? model.latent_format : "its diffusion model";
    std::printf("%s reads %u channels, %u x %u pixels packed into one: ", reader, model.packed_channels, model.packing,
                model.packing);
    if (model.statistics_count == 0) {
        std::printf("(z - %g) * %g\n", model.latent_shift, model.latent_scale);
    } else {
        std::printf("(z - mean) / deviation of each, first %g and %g\n", model.latent_means[0],
                    model.latent_deviations[0]);
    }
}

static void roundtrip(const char *weights, int64_t frames, int64_t height, int64_t width) {
    video_vae::Vae vae(weights);
    vae.configure("memory_limit", "8GiB");

    // Bytes as they come from a decoder or a file; the wrapper describes them, nothing is copied.
    vvae_model_desc model = vae.model();
    describe(model);
    int64_t channels = model.pixel_channels;
    auto clip = make_clip(frames, height, width, channels);
    auto back = std::vector<uint8_t>(clip.size());
    auto video = Tensor::interleaved(clip.data(), frames, height, width, channels);

    auto plan = vae.plan("encode", video.shape);
    std::printf("%s\n", plan.text.c_str());
    video_vae::Shape shape;
    std::copy(std::begin(plan.info.output_shape), std::end(plan.info.output_shape), shape.begin());
    std::vector<float> numbers(std::size_t(shape[0] * shape[1] * shape[2] * shape[3] * shape[4]));
    auto latent = Tensor::of(numbers.data(), shape);

    video_vae::Run run;
    run.progress = [](uint64_t done, uint64_t total, const char *stage) {
        std::fprintf(stderr, "\r%s %3.0f%% ", stage, total ? 100.0 * double(done) / double(total) : 0.0);
        return true; // false would cancel
    };
    vae.encode(video, latent, run);
    std::printf("%s\n", vae.plan("decode", shape).text.c_str());
    vae.decode(latent, Tensor::interleaved(back.data(), frames, height, width, channels), run);
    std::printf("\n%.1f dB between the clip and what came back\n", psnr(clip, back));
}

int main(int argc, char **argv) try {
    if (argc != 2 && argc != 5) return std::fprintf(stderr, "usage: roundtrip WEIGHTS [FRAMES HEIGHT WIDTH]\n"), 2;
    int64_t sizes[3] = {9, 64, 96};
    for (int i = 2; i < argc; i++) sizes[i - 2] = std::max(1LL, std::atoll(argv[i]));
    roundtrip(argv[1], sizes[0], sizes[1], sizes[2]);
} catch (const video_vae::Error &error) {
    std::fprintf(stderr, "roundtrip: %s (status %d)\n", error.what(), error.status());
    return 1;
}
