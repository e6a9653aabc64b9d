#include "catalog.h"

namespace host {

namespace {

template <class T> T sized() {
    T value{};
    value.struct_size = sizeof value;
    return value;
}

Port port_of(const Library &library, uint32_t node, uint32_t index) {
    auto desc = sized<vvae_port_desc>();
    if (library.vvae_port_info(node, index, &desc) != VVAE_OK) fail(library, "port");
    Port port{desc.name, desc.kind, desc.help, desc.direction == VVAE_PORT_INPUT, desc.optional == 1, {}};
    port.dtypes.assign(desc.dtypes, desc.dtypes + desc.dtype_count);
    return port;
}

Param param_of(const Library &library, uint32_t node, uint32_t index) {
    auto desc = sized<vvae_param_desc>();
    if (library.vvae_param_info(node, index, &desc) != VVAE_OK) fail(library, "parameter");
    Param param{desc.key,   desc.default_value, desc.unit, desc.help, desc.kind,
                desc.flags, desc.min,           desc.max,  desc.step, {}};
    for (uint32_t i = 0; i < desc.choice_count && library.vvae_choice; i++) {
        param.choices.push_back(library.vvae_choice(node, index, i));
    }
    return param;
}

NodeType node_of(const Library &library, uint32_t index) {
    auto desc = sized<vvae_node_desc>();
    if (library.vvae_node_info(index, &desc) != VVAE_OK) fail(library, "node");
    NodeType node{desc.id, desc.label, desc.help, true, {}, {}};
    for (uint32_t i = 0; i < library.vvae_port_count(index); i++) node.ports.push_back(port_of(library, index, i));
    for (uint32_t i = 0; i < library.vvae_param_count(index); i++) node.params.push_back(param_of(library, index, i));
    return node;
}

Param number(const char *key, const char *value, const char *unit, const char *help, double max) {
    return {key, value, unit, help, VVAE_PARAM_INT, VVAE_PARAM_HAS_RANGE, 0, max, 1, {}};
}

Catalog own_nodes() {
    Port out{"video", "video", "The clip, in bytes.", false, false, {VVAE_DTYPE_U8}};
    Port in{"video", "video", "The clip.", true, false, {VVAE_DTYPE_U8}};
    Param from{"path", "", "", "A folder of .ppm or .pam files, such a file, or raw bytes with the model's channels."};
    Param to{"path", "", "", "A folder, which gets a picture a frame, or a .ppm, .pam or .rgb file."};
    auto width = [](const char *value, const char *help) { return number("width", value, "pixels", help, 131072); };
    auto height = [](const char *value, const char *help) { return number("height", value, "pixels", help, 131072); };
    const char *raw = "Of raw bytes, which do not say it.";
    return {
        {"frames_in", "Frames from files", "Reads a clip.", false, {out}, {from, width("0", raw), height("0", raw)}},
        {"test_pattern", "Test pattern", "Makes a clip of a disc that moves over a gradient.", false, {out},
         {number("frames", "9", "frames", "Length.", 100000), width("96", "Size."), height("64", "Size.")}},
        {"frames_out", "Frames to files", "Writes a clip.", false, {in}, {to}},
    };
}

} // namespace

const Port *NodeType::port(const std::string &name) const {
    for (const Port &port : ports) {
        if (port.name == name) return &port;
    }
    return nullptr;
}

const Param *NodeType::param(const std::string &key) const {
    for (const Param &param : params) {
        if (param.key == key) return &param;
    }
    return nullptr;
}

Catalog make_catalog(const Library &library) {
    Catalog catalog = own_nodes();
    for (uint32_t i = 0; i < library.vvae_node_count(); i++) catalog.push_back(node_of(library, i));
    return catalog;
}

} // namespace host
