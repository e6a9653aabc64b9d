// video-vae for C++17: handles that free themselves, failures that throw. A thin layer over video_vae.h; read that first.
//
//     video_vae::Vae vae("ema_vae_fp16.safetensors");
//     vae.configure("memory_limit", "8GiB");
//     auto video = video_vae::Tensor::interleaved(rgb.data(), 21, 720, 1280);
//     auto latent = video_vae::Tensor::of(out.data(), {1, 16, 6, 90, 160});
//     vae.encode(video, latent);

#ifndef VIDEO_VAE_HPP
#define VIDEO_VAE_HPP

#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "video_vae.h"

namespace video_vae {

using Shape = std::array<int64_t, 5>;

// A failed call: its status and its text.
class Error : public std::runtime_error {
public:
    Error(int32_t status, const std::string &text) : std::runtime_error(text), status_(status) {}
    int32_t status() const noexcept { return status_; }

private:
    int32_t status_;
};

namespace detail {

// The failed call was on this thread, so its text is the thread's, whichever handle it was about.
inline int32_t check(int32_t status) {
    if (status >= 0) return status;
    std::string text(static_cast<std::size_t>(vvae_error(nullptr, nullptr, 0)), '\0');
    vvae_error(nullptr, text.data(), text.size() + 1);
    throw Error(status, text);
}

template <class T> T sized() {
    T value{};
    value.struct_size = sizeof(T);
    return value;
}

} // namespace detail

// Memory of the caller's, described. Owns nothing.
struct Tensor {
    void *data = nullptr;
    uint32_t dtype = VVAE_DTYPE_F32;
    Shape shape{};
    std::optional<Shape> strides{}; // in elements; none: compact
    int32_t device_type = VVAE_DEVICE_CPU;
    int32_t device_id = 0;

    // [B, C, T, H, W], compact unless strides are given. The element type follows from T.
    template <class T> static Tensor of(T *data, const Shape &shape, std::optional<Shape> strides = std::nullopt) {
        using Element = std::remove_const_t<T>;
        static_assert(std::is_same_v<Element, uint8_t> || std::is_same_v<Element, uint16_t> ||
                          std::is_same_v<Element, float>,
                      "for f16 and bf16, which C++17 has no types for, set dtype yourself");
        constexpr uint32_t dtype = std::is_same_v<Element, uint8_t>    ? VVAE_DTYPE_U8
                                   : std::is_same_v<Element, uint16_t> ? VVAE_DTYPE_U16
                                                                       : VVAE_DTYPE_F32;
        return {const_cast<Element *>(data), dtype, shape, strides};
    }

    // Frames of pixels with their channels side by side: [T, H, W, C] in memory.
    template <class T>
    static Tensor interleaved(T *data, int64_t frames, int64_t height, int64_t width, int64_t channels = 3) {
        int64_t row = width * channels, frame = height * row;
        return of(data, {1, channels, frames, height, width}, Shape{frames * frame, 1, frame, row, channels});
    }

    // Valid as long as this is neither changed nor gone.
    vvae_tensor raw() const {
        return {data, device_type, device_id, 5, dtype, shape.data(), strides ? strides->data() : nullptr, 0};
    }
};

// What goes with one run.
struct Run {
    // Answer false to stop the run. What it throws comes out of the run.
    std::function<bool(uint64_t done, uint64_t total, const char *stage)> progress{};
    // Encode: where to write the log-variance.
    std::optional<Tensor> logvar{};
    std::optional<void *> cuda_stream{};
};

namespace detail {

// A Run as C has it, for the time of one call.
class RunCall {
public:
    explicit RunCall(const Run &run) : run_(run), info_(sized<vvae_run_info>()) {
        if (run.progress) {
            info_.progress = &RunCall::tell;
            info_.progress_user = this;
        }
        if (run.logvar) {
            logvar_ = run.logvar->raw();
            info_.logvar = &logvar_;
        }
        if (run.cuda_stream) {
            info_.flags = VVAE_RUN_HAS_STREAM;
            info_.cuda_stream = *run.cuda_stream;
        }
    }
    RunCall(const RunCall &) = delete;
    RunCall &operator=(const RunCall &) = delete;

    const vvae_run_info *info() const { return &info_; }
    bool threw() const { return thrown_ != nullptr; }

    // The status of the call; what the callback threw comes before what the call says about being stopped by it.
    int32_t check(int32_t status) const {
        if (thrown_) std::rethrow_exception(thrown_);
        return detail::check(status);
    }

private:
    static int32_t tell(void *user, uint64_t done, uint64_t total, const char *stage) noexcept {
        auto *self = static_cast<RunCall *>(user);
        try {
            return self->run_.progress(done, total, stage) ? 0 : 1;
        } catch (...) {
            self->thrown_ = std::current_exception();
            return 1;
        }
    }

    const Run &run_;
    vvae_run_info info_;
    vvae_tensor logvar_{};
    std::exception_ptr thrown_;
};

struct CloseStream {
    void operator()(vvae_stream *s) const noexcept { vvae_stream_close(s); }
};

struct FreeHandle {
    void operator()(::vvae *v) const noexcept { vvae_free(v); }
};

} // namespace detail

// Frames of a clip.
struct FrameRange {
    int64_t first, count;
};

struct Plan {
    vvae_plan_info info;
    std::string text;
};

// A run that has finished, and the plan that it ran by in words.
struct RunReport {
    vvae_run_report info;
    std::string text;
};

// A clip in pieces. Ends with its Vae at the latest.
class Stream {
public:
    struct Pulled {
        int32_t status; // VVAE_OK, VVAE_AGAIN: push more, VVAE_END: all is done
        int64_t frames;
    };

    // How many frames were taken from the front. If not all: pull, then push the rest.
    int64_t push(const Tensor &frames) {
        int64_t taken = 0;
        vvae_tensor tensor = frames.raw();
        detail::check(vvae_stream_push(stream_.get(), &tensor, &taken));
        return taken;
    }

    // Says that the clip is complete.
    void finish() { detail::check(vvae_stream_push(stream_.get(), nullptr, nullptr)); }

    // A cancelled pull is not thrown but returned, as VVAE_ERROR_CANCELLED: its frames count, and the next pull goes on
    // after them.
    Pulled pull(const Tensor &out, const Run &run = {}) {
        Pulled pulled{VVAE_OK, 0};
        vvae_tensor tensor = out.raw();
        detail::RunCall call(run);
        const int32_t status = vvae_stream_pull(stream_.get(), &tensor, call.info(), &pulled.frames);
        pulled.status = status == VVAE_ERROR_CANCELLED && !call.threw() ? status : call.check(status);
        return pulled;
    }

    vvae_stream *raw() const noexcept { return stream_.get(); }

private:
    friend class Vae;
    explicit Stream(vvae_stream *stream) : stream_(stream) {}

    std::unique_ptr<vvae_stream, detail::CloseStream> stream_;
};

struct Options {
    std::string device = "auto";
    // Must not throw: there is nobody to catch it.
    std::function<void(int32_t level, const char *message)> log{};
    vvae_alloc_fn alloc = nullptr;
    vvae_free_fn free = nullptr;
    void *alloc_user = nullptr;
    vvae_device_alloc_fn device_alloc = nullptr;
    vvae_device_free_fn device_free = nullptr;
    void *device_alloc_user = nullptr;
};

// A model on a device, with its settings.
class Vae {
public:
    explicit Vae(const std::string &weights, Options options = {})
        : options_(std::make_unique<Options>(std::move(options))) {
        auto info = detail::sized<vvae_create_info>();
        info.abi_version = VVAE_ABI_VERSION;
        info.weights = weights.c_str();
        info.device = options_->device.c_str();
        if (options_->log) {
            info.log = &Vae::log;
            info.log_user = options_.get();
        }
        info.alloc = options_->alloc;
        info.free = options_->free;
        info.alloc_user = options_->alloc_user;
        info.device_alloc = options_->device_alloc;
        info.device_free = options_->device_free;
        info.device_alloc_user = options_->device_alloc_user;
        ::vvae *v = nullptr;
        detail::check(vvae_create(&info, &v));
        handle_.reset(v);
    }

    void configure(const std::string &key, const std::string &value) {
        detail::check(vvae_configure(raw(), key.c_str(), value.c_str()));
    }

    void encode(const Tensor &video, const Tensor &latent, const Run &run = {}) {
        vvae_tensor in = video.raw(), out = latent.raw();
        detail::RunCall call(run);
        call.check(vvae_encode(raw(), &in, &out, call.info()));
    }

    void decode(const Tensor &latent, const Tensor &video, const Run &run = {}) {
        vvae_tensor in = latent.raw(), out = video.raw();
        detail::RunCall call(run);
        call.check(vvae_decode(raw(), &in, &out, call.info()));
    }

    // The input frames that a range of output frames needs, of a clip of clip_frames input frames. A count of 0 in
    // `range` stands for all frames up to the end of the clip.
    FrameRange range_inputs(const char *node, int64_t clip_frames, FrameRange range) const {
        FrameRange inputs{0, 0};
        detail::check(vvae_range_inputs(raw(), node, clip_frames, range.first, range.count, &inputs.first,
                                        &inputs.count));
        return inputs;
    }

    // A range of latent frames: as many as `latent` has, from `first` on. `video` has what range_inputs says.
    void encode_range(const Tensor &video, int64_t clip_frames, int64_t first, const Tensor &latent,
                      const Run &run = {}) {
        vvae_tensor in = video.raw(), out = latent.raw();
        detail::RunCall call(run);
        call.check(vvae_encode_range(raw(), &in, clip_frames, first, &out, call.info()));
    }

    // A range of video frames: as many as `video` has, from `first` on. `latent` has what range_inputs says.
    void decode_range(const Tensor &latent, int64_t clip_frames, int64_t first, const Tensor &video,
                      const Run &run = {}) {
        vvae_tensor in = latent.raw(), out = video.raw();
        detail::RunCall call(run);
        call.check(vvae_decode_range(raw(), &in, clip_frames, first, &out, call.info()));
    }

    // What a job would take; node is "encode" or "decode", shape that of what goes in.
    Plan plan(const char *node, const Shape &shape) const {
        return plan_with([&](vvae_plan_info *info, char *text, uint64_t capacity) {
            return vvae_plan(raw(), node, shape.data(), info, text, capacity);
        });
    }

    // The same for a range of the output; shape is that of the whole clip.
    Plan plan_range(const char *node, const Shape &shape, FrameRange range) const {
        return plan_with([&](vvae_plan_info *info, char *text, uint64_t capacity) {
            return vvae_plan_range(raw(), node, shape.data(), range.first, range.count, info, text, capacity);
        });
    }

    // The plan as JSON: its steps, and what lies where in memory. vvae_plan_timeline says what is in it.
    std::string plan_timeline(const char *node, const Shape &shape) const {
        std::string text;
        uint64_t length = 0;
        detail::check(vvae_plan_timeline(raw(), node, shape.data(), nullptr, 0, &length));
        while (text.size() < length) {
            // Free memory may have changed in between, and the plan with it.
            text.resize(static_cast<std::size_t>(length));
            detail::check(vvae_plan_timeline(raw(), node, shape.data(), text.data(), text.size() + 1, &length));
        }
        text.resize(static_cast<std::size_t>(length));
        return text;
    }

    // With `first` the output begins with that frame of the clip, and the input where range_inputs says for a count of
    // 0. So a clip is resumed, with the same bits: `first` is the number of frames that were pulled.
    Stream stream(const char *node, const Shape &shape, int64_t first = 0) {
        vvae_stream *s = nullptr;
        detail::check(vvae_stream_open_at(raw(), node, shape.data(), first, &s));
        return Stream(s);
    }

    // From any thread.
    void cancel() const { detail::check(vvae_cancel(raw())); }

    vvae_model_desc model() const {
        auto model = detail::sized<vvae_model_desc>();
        detail::check(vvae_model_info(raw(), &model));
        return model;
    }

    vvae_memory_info memory() const {
        auto memory = detail::sized<vvae_memory_info>();
        detail::check(vvae_memory(raw(), &memory));
        return memory;
    }

    // What one device of the handle holds, and its part of the last plan or run. From any thread.
    vvae_handle_device_info device(std::uint32_t index = 0) const {
        auto device = detail::sized<vvae_handle_device_info>();
        detail::check(vvae_handle_device(raw(), index, &device));
        return device;
    }

    // About the last encode, decode, or pull that wrote frames. From any thread.
    RunReport last_run() const {
        RunReport report{detail::sized<vvae_run_report>(), {}};
        detail::check(vvae_last_run(raw(), &report.info, nullptr, 0));
        report.text.resize(static_cast<std::size_t>(report.info.text_length));
        detail::check(vvae_last_run(raw(), &report.info, report.text.data(), report.text.size() + 1));
        // Another run may have finished in between.
        report.text.resize(std::strlen(report.text.c_str()));
        return report;
    }

    void trim(uint32_t what = VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS) { detail::check(vvae_trim(raw(), what)); }

    ::vvae *raw() const noexcept { return handle_.get(); }

private:
    template <class Ask> static Plan plan_with(const Ask &ask) {
        Plan plan{detail::sized<vvae_plan_info>(), {}};
        detail::check(ask(&plan.info, nullptr, 0));
        plan.text.resize(static_cast<std::size_t>(plan.info.text_length));
        detail::check(ask(&plan.info, plan.text.data(), plan.text.size() + 1));
        return plan;
    }

    static void log(void *user, int32_t level, const char *message) noexcept {
        static_cast<Options *>(user)->log(level, message);
    }

    // Declared before the handle, so that it outlives it: freeing may still write to the log.
    std::unique_ptr<Options> options_;
    std::unique_ptr<::vvae, detail::FreeHandle> handle_;
};

inline std::vector<vvae_device_desc> devices() {
    std::vector<vvae_device_desc> all(vvae_device_count(), detail::sized<vvae_device_desc>());
    for (std::size_t i = 0; i < all.size(); i++) {
        detail::check(vvae_device_info(static_cast<uint32_t>(i), &all[i]));
    }
    return all;
}

} // namespace video_vae

#endif // VIDEO_VAE_HPP
