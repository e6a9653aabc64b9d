// Raw RGB through encode and decode on video_vae.hpp: what a graph of the same steps has to give, bit for bit.
//
//     expected WEIGHTS IN.rgb OUT.rgb HEIGHT WIDTH
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "video_vae.hpp"

int main(int argc, char **argv) try {
    if (argc != 6) return 2;
    std::ifstream in(argv[2], std::ios::binary);
    std::vector<char> rgb{std::istreambuf_iterator<char>(in), {}};
    int64_t height = std::atoll(argv[4]), width = std::atoll(argv[5]), frames = int64_t(rgb.size()) / (height * width * 3);
    auto video = video_vae::Tensor::interleaved(reinterpret_cast<uint8_t *>(rgb.data()), frames, height, width);

    video_vae::Options options;
    options.device = "cpu";
    video_vae::Vae vae(argv[1], options);
    video_vae::Shape shape;
    auto plan = vae.plan("encode", video.shape);
    std::copy(std::begin(plan.info.output_shape), std::end(plan.info.output_shape), shape.begin());
    std::vector<float> numbers(std::size_t(shape[0] * shape[1] * shape[2] * shape[3] * shape[4]));
    auto latent = video_vae::Tensor::of(numbers.data(), shape);
    vae.encode(video, latent);
    vae.decode(latent, video);
    std::ofstream(argv[3], std::ios::binary).write(rgb.data(), std::streamsize(rgb.size()));
} catch (const std::exception &error) {
    std::fprintf(stderr, "expected: %s\n", error.what());
    return 1;
}
