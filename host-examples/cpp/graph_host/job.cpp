#include "job.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "frames.h"
#include "interrupt.h"
#include "progress.h"
#include "value.h"

namespace host {

namespace {

int64_t whole_number(const Node &node, const std::string &key) {
    const std::string &text = node.params.at(key);
    char *end = nullptr;
    long long number = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end || double(number) < 0 || double(number) > node.type->param(key)->max) {
        throw std::runtime_error("node \"" + node.id + "\": " + key + " is \"" + text +
                                 "\", and has to be a whole number that is not too large");
    }
    return number;
}

bool takes(const Port &port, uint32_t dtype) {
    return std::find(port.dtypes.begin(), port.dtypes.end(), dtype) != port.dtypes.end();
}

class Job {
public:
    Job(const Library &library, const Graph &graph)
        : library_(library), graph_(graph), handle_(nullptr, Free{&library}), values_(graph.nodes.size()) {}

    void run() {
        open();
        // Sources first: they are quick, and the plan of everything else follows from their sizes.
        for (std::size_t i = 0; i < graph_.nodes.size(); i++) {
            if (!graph_.nodes[i].type->from_library && graph_.nodes[i].inputs.empty()) read(i);
        }
        for (std::size_t i = 0; i < graph_.nodes.size(); i++) {
            if (graph_.nodes[i].type->from_library) plan(i);
        }
        std::fflush(stdout);
        for (std::size_t i = 0; i < graph_.nodes.size(); i++) {
            check_interrupt();
            if (graph_.nodes[i].type->from_library) {
                compute(i);
            } else if (!graph_.nodes[i].inputs.empty()) {
                write(i);
            }
        }
    }

private:
    struct Free {
        const Library *library;
        void operator()(vvae *v) const {
            interrupts_cancel(nullptr);
            library->vvae_free(v);
        }
    };

    void open() {
        vvae_create_info info{};
        info.struct_size = sizeof info;
        info.abi_version = VVAE_ABI_VERSION;
        info.weights = graph_.checkpoint.c_str();
        info.device = graph_.device.c_str();
        vvae *v = nullptr;
        if (library_.vvae_create(&info, &v) != VVAE_OK) fail(library_, "the checkpoint cannot be opened");
        handle_.reset(v);
        interrupts_cancel(v);
        model_.struct_size = sizeof model_;
        if (library_.vvae_model_info(v, &model_) != VVAE_OK) fail(library_, "the model is not told");
        std::printf("%s: %s, %u channels of pixels\n", graph_.checkpoint.c_str(), model_.family, model_.pixel_channels);
    }

    // All settings of the node, defaults too: nodes share one handle, and what one has set must not reach the next.
    void configure(const Node &node) {
        for (const Param &param : node.type->params) {
            const std::string &value = node.params.at(param.key);
            if (library_.vvae_configure(handle_.get(), param.key.c_str(), value.c_str()) != VVAE_OK) {
                fail(library_, "node \"" + node.id + "\"");
            }
        }
    }

    // The tensor of the node's one input; its shape is known when planning, its content when running.
    Value &input(const Node &node) {
        for (const Port &port : node.type->ports) {
            if (!port.input) continue;
            const Node::Source &source = node.inputs.at(port.name);
            return values_[source.node].at(source.port);
        }
        throw std::runtime_error("node type \"" + node.type->id + "\" has no input, which this host cannot run");
    }

    void read(std::size_t index) {
        const Node &node = graph_.nodes[index];
        Shape shape{1, model_.pixel_channels, 0, whole_number(node, "height"), whole_number(node, "width")};
        bool from_files = node.type->id == "frames_in";
        if (!from_files) shape[2] = whole_number(node, "frames");
        values_[index]["video"] =
            from_files ? read_frames(std::filesystem::u8path(node.params.at("path")), shape) : test_pattern(shape);
    }

    void plan(std::size_t index) {
        const Node &node = graph_.nodes[index];
        const Value &in = input(node);
        configure(node);
        vvae_plan_info info{};
        info.struct_size = sizeof info;
        char words[2048];
        int32_t status =
            library_.vvae_plan(handle_.get(), node.type->id.c_str(), in.shape.data(), &info, words, sizeof words);
        if (status != VVAE_OK) fail(library_, "node \"" + node.id + "\"");
        std::printf("plan of %s: %s\n", node.id.c_str(), words);

        Shape shape;
        std::copy(std::begin(info.output_shape), std::end(info.output_shape), shape.begin());
        for (const Port &port : node.type->ports) {
            if (port.input) continue;
            values_[index][port.name] = output(port, shape, in.clip);
        }
    }

    // Empty for now: memory is taken when the node runs.
    Value output(const Port &port, const Shape &planned, const Shape &clip) const {
        Value value;
        value.dtype = port.kind == "video" ? VVAE_DTYPE_U8 : VVAE_DTYPE_F32;
        if (!takes(port, value.dtype)) throw std::runtime_error("port \"" + port.name + "\" has no type of this host's");
        value.shape = planned;
        // Of the length and size of the clip, and with the channels of the model.
        if (port.kind == "video") std::copy(clip.begin() + 2, clip.end(), value.shape.begin() + 2);
        value.clip = clip;
        return value;
    }

    void compute(std::size_t index) {
        const Node &node = graph_.nodes[index];
        configure(node);
        Value &in = input(node);
        for (auto &[name, value] : values_[index]) {
            if (!node.type->port(name)->optional || graph_.is_used(index, name)) {
                bool pixels = value.dtype == VVAE_DTYPE_U8;
                value = pixels ? Value::frames(value.shape) : Value::floats(value.shape, value.clip);
            }
        }
        Progress progress(node.id);
        vvae_run_info run{};
        run.struct_size = sizeof run;
        run.progress = &Progress::tell;
        run.progress_user = &progress;
        if (call(index, in, run) == VVAE_OK) return progress.done();
        progress.stopped();
        check_interrupt();
        fail(library_, "node \"" + node.id + "\"");
    }

    // The two verbs this host knows. A newer library may have nodes beyond them.
    int32_t call(std::size_t index, Value &in, vvae_run_info &run) {
        const std::string &type = graph_.nodes[index].type->id;
        vvae_tensor from = in.tensor();
        if (type == "encode" && library_.vvae_encode) {
            vvae_tensor latent = values_[index].at("latent").tensor(), logvar{};
            auto second = values_[index].find("logvar");
            if (second != values_[index].end() && !second->second.bytes.empty()) {
                logvar = second->second.tensor();
                run.logvar = &logvar;
            }
            return library_.vvae_encode(handle_.get(), &from, &latent, &run);
        }
        if (type == "decode" && library_.vvae_decode) {
            vvae_tensor video = values_[index].at("video").tensor();
            return library_.vvae_decode(handle_.get(), &from, &video, &run);
        }
        throw std::runtime_error("this host does not know how to run \"" + type + "\"");
    }

    void write(std::size_t index) {
        const Node &node = graph_.nodes[index];
        if (node.params.at("path").empty()) throw std::runtime_error("node \"" + node.id + "\" needs a \"path\"");
        const Value &clip = input(node);
        write_frames(std::filesystem::u8path(node.params.at("path")), clip);
        std::printf("%s: %lld frames of %lld x %lld in %s\n", node.id.c_str(), static_cast<long long>(clip.shape[2]),
                    static_cast<long long>(clip.shape[4]), static_cast<long long>(clip.shape[3]),
                    node.params.at("path").c_str());
    }

    const Library &library_;
    const Graph &graph_;
    std::unique_ptr<vvae, Free> handle_;
    vvae_model_desc model_{};
    // By node, then by name of the output.
    std::vector<std::map<std::string, Value>> values_;
};

} // namespace

void run_graph(const Library &library, const Graph &graph) { Job(library, graph).run(); }

} // namespace host
