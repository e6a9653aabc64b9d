// A C++ program that links the library, through the wrapper: every member once, and exceptions both ways.
#include <cstdio>
#include <cstring>

#include "video_vae.hpp"

namespace {

void expect(bool good, const char *what) {
    if (!good) throw std::logic_error(what);
}

template <class E, class F> E thrown_by(F &&body) {
    try {
        body();
    } catch (const E &error) {
        return error;
    }
    throw std::logic_error("nothing was thrown");
}

void use(const std::string &weights) {
    using video_vae::Tensor;
    int lines = 0;
    video_vae::Options options;
    options.device = "cpu";
    options.log = [&](int32_t, const char *) { lines++; };
    video_vae::Vae first(weights, options);
    expect(lines > 0, "the log is silent");
    video_vae::Vae vae = std::move(first);
    expect(thrown_by<video_vae::Error>([&] { vae.last_run(); }).status() == VVAE_ERROR_STATE, "no last run");

    auto model = vae.model();
    expect(model.pixel_channels == 3 && model.spatial_scale == 8 && model.time_scale == 4, "model");
    std::vector<uint8_t> rgb(5 * 16 * 16 * 3, 100), back(rgb.size());
    std::vector<float> latent(model.latent_channels * 2 * 2 * 2), logvar(latent.size());
    video_vae::Shape shape{1, model.latent_channels, 2, 2, 2};
    auto video = Tensor::interleaved(rgb.data(), 5, 16, 16);
    auto latents = Tensor::of(latent.data(), shape);

    auto plan = vae.plan("encode", video.shape);
    expect(plan.info.device_bytes > 0 && plan.text.size() == plan.info.text_length, "plan");
    expect(std::strlen(plan.text.c_str()) == plan.text.size(), "plan text");
    auto timeline = vae.plan_timeline("encode", video.shape);
    expect(timeline.rfind("{\"devices\":[", 0) == 0 && timeline.back() == '}', "timeline");
    video_vae::Run run;
    run.logvar = Tensor::of(logvar.data(), shape);
    int told = 0;
    run.progress = [&](uint64_t, uint64_t, const char *) { return ++told > 0; };
    vae.encode(video, latents, run);
    expect(told > 0 && logvar != std::vector<float>(logvar.size()), "encode");
    vae.decode(latents, Tensor::interleaved(back.data(), 5, 16, 16));
    auto last = vae.last_run();
    expect(last.info.exact == 1 && std::string("decode") == last.info.node && last.info.seconds > 0, "last run");
    expect(last.text == vae.plan("decode", shape).text, "the plan of the last run");
    expect(vae.memory().peak > 0, "memory");
    expect(vae.device().device_count == 1 && vae.device().peak == vae.memory().peak, "a device's memory");
    expect(thrown_by<video_vae::Error>([&] { vae.device(1); }).status() == VVAE_ERROR_ARGUMENT, "no second device");
    vae.trim();

    run.progress = [](uint64_t, uint64_t, const char *) { return false; };
    expect(thrown_by<video_vae::Error>([&] { vae.encode(video, latents, run); }).status() == VVAE_ERROR_CANCELLED,
           "a callback that stops");
    run.progress = [](uint64_t, uint64_t, const char *) -> bool { throw std::out_of_range("mine"); };
    expect(std::string("mine") == thrown_by<std::out_of_range>([&] { vae.encode(video, latents, run); }).what(),
           "a callback that throws");
    auto error = thrown_by<video_vae::Error>([&] { vae.configure("threads", "many"); });
    expect(error.status() == VVAE_ERROR_ARGUMENT && std::strstr(error.what(), "\"many\""), "a refused value");
    expect(thrown_by<video_vae::Error>([] { video_vae::Vae("/no/such/file"); }).status() == VVAE_ERROR_CHECKPOINT,
           "a missing file");

    auto stream = vae.stream("decode", shape);
    expect(stream.push(latents) <= 2, "push");
    stream.finish();
    int64_t frames = 0;
    for (;;) {
        auto pulled = stream.pull(Tensor::interleaved(back.data(), 5, 16, 16));
        frames += pulled.frames;
        if (pulled.status == VVAE_END) break;
        expect(pulled.status == VVAE_OK, "pull");
    }
    expect(frames == 5, "frames of the stream");

    // The last three of 129 frames, from the latents that they need.
    std::vector<float> clip(model.latent_channels * 33 * 4), whole(3 * 129 * 256), part(3 * 3 * 256);
    for (std::size_t i = 0; i < clip.size(); i++) clip[i] = static_cast<float>(i % 17) / 17;
    video_vae::Shape clip_shape{1, model.latent_channels, 33, 2, 2}, strides{0, 33 * 4, 4, 2, 1};
    vae.decode(Tensor::of(clip.data(), clip_shape), Tensor::of(whole.data(), {1, 3, 129, 16, 16}));
    auto inputs = vae.range_inputs("decode", 33, {126, 3});
    expect(inputs.first > 0 && inputs.first + inputs.count == 33, "the latents of a range");
    auto needed = Tensor::of(clip.data() + inputs.first * 4, {1, model.latent_channels, inputs.count, 2, 2}, strides);
    vae.decode_range(needed, 33, 126, Tensor::of(part.data(), {1, 3, 3, 16, 16}));
    for (std::size_t c = 0; c < 3; c++) {
        expect(std::memcmp(&part[c * 3 * 256], &whole[(c * 129 + 126) * 256], 3 * 256 * sizeof(float)) == 0, "a range");
    }
    expect(vae.plan_range("decode", clip_shape, {126, 3}).info.output_shape[2] == 3, "the plan of a range");
    auto refused = thrown_by<video_vae::Error>([&] { vae.range_inputs("decode", 33, {129, 1}); });
    expect(refused.status() == VVAE_ERROR_ARGUMENT, "a range outside the clip");
    std::vector<float> again(model.latent_channels * 3 * 4);
    inputs = vae.range_inputs("encode", 129, {30, 3});
    video_vae::Shape some{1, 3, inputs.count, 16, 16}, of_whole{0, 129 * 256, 256, 16, 1};
    vae.encode_range(Tensor::of(whole.data() + inputs.first * 256, some, of_whole), 129, 30,
                     Tensor::of(again.data(), {1, model.latent_channels, 3, 2, 2}));
    expect(again != std::vector<float>(again.size()), "encode of a range");

    // A stream that is resumed: another one, which begins with the frame that comes next.
    auto resumed = vae.stream("decode", clip_shape, 126);
    inputs = vae.range_inputs("decode", 33, {126, 0});
    std::vector<float> frame(3 * 256);
    for (int64_t pushed = 0, pulled = 126; pulled < 129;) {
        int64_t left = inputs.count - pushed;
        auto rest = Tensor::of(clip.data() + (inputs.first + pushed) * 4, {1, model.latent_channels, left, 2, 2}, strides);
        if (left > 0) pushed += resumed.push(rest);
        else resumed.finish();
        for (; resumed.pull(Tensor::of(frame.data(), {1, 3, 1, 16, 16})).frames == 1; pulled++) {
            for (std::size_t c = 0; c < 3; c++) {
                expect(std::memcmp(&frame[c * 256], &whole[(c * 129 + pulled) * 256], 256 * sizeof(float)) == 0, "a resumed stream");
            }
        }
    }

    vae.cancel();
    expect(!video_vae::devices().empty() && std::string("cpu") == video_vae::devices()[0].id, "devices");
}

} // namespace

int main(int argc, char **argv) {
    try {
        use(argc > 1 ? argv[1] : "");
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
        return 1;
    }
    std::puts("ok");
}
