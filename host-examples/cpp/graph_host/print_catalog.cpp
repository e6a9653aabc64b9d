// The catalog in words. A host with a window would make a menu of the nodes, sockets of the ports, and of each
// parameter the widget its kind asks for.
#include "catalog.h"

#include <cstdio>

namespace host {

namespace {

const char *dtype_name(uint32_t dtype) {
    switch (dtype) {
    case VVAE_DTYPE_U8: return "u8";
    case VVAE_DTYPE_U16: return "u16";
    case VVAE_DTYPE_F16: return "f16";
    case VVAE_DTYPE_BF16: return "bf16";
    case VVAE_DTYPE_F32: return "f32";
    default: return "?"; // a newer library may have more
    }
}

std::string joined(const std::vector<std::string> &words) {
    std::string text;
    for (const auto &word : words) text += (text.empty() ? "" : " | ") + word;
    return text;
}

std::string short_number(double value) {
    char text[40];
    std::snprintf(text, sizeof text, "%.12g", value);
    return text;
}

std::string widget(const Param &param) {
    std::string text;
    switch (param.kind) {
    case VVAE_PARAM_INT: text = "whole number"; break;
    case VVAE_PARAM_FLOAT: text = "number"; break;
    case VVAE_PARAM_BOOL: text = "switch"; break;
    case VVAE_PARAM_CHOICE: text = "one of " + joined(param.choices); break;
    case VVAE_PARAM_BYTES: text = "bytes, such as 8GiB"; break;
    default: text = "text"; break;
    }
    // The largest number of bytes says nothing to people, and "such as 8GiB" has the unit.
    if (param.kind != VVAE_PARAM_BYTES) {
        bool any = param.kind == VVAE_PARAM_INT && param.max >= 9e18;
        if (param.flags & VVAE_PARAM_HAS_RANGE) {
            text += " " + short_number(param.min) + (any ? " or more" : " to " + short_number(param.max));
        }
        if (!param.unit.empty()) text += " " + param.unit;
    }
    if (param.flags & VVAE_PARAM_HAS_AUTO) text += ", or auto";
    return text;
}

void print_devices(const Library &library) {
    if (!library.vvae_device_count || !library.vvae_device_info) return;
    for (uint32_t i = 0; i < library.vvae_device_count(); i++) {
        vvae_device_desc device{};
        device.struct_size = sizeof device;
        if (library.vvae_device_info(i, &device) != VVAE_OK) continue;
        std::printf("device  %-8s %s", device.id, device.name);
        if (device.device_type == VVAE_DEVICE_CUDA) {
            std::printf(", compute capability %u.%u, %s", device.compute_major, device.compute_minor, device.uuid);
        }
        std::printf(", %.1f of %.1f GiB free\n", double(device.memory_free) / (1 << 30), double(device.memory_total) / (1 << 30));
    }
}

void print_node(const NodeType &node) {
    std::printf("\nnode    %s: %s%s\n        %s\n", node.id.c_str(), node.label.c_str(),
                node.from_library ? "" : " (of this host)", node.help.c_str());
    for (const Port &port : node.ports) {
        std::vector<std::string> dtypes;
        for (uint32_t dtype : port.dtypes) dtypes.push_back(dtype_name(dtype));
        std::printf("  %-5s %s: %s%s, %s\n        %s\n", port.input ? "in" : "out", port.name.c_str(), port.kind.c_str(),
                    port.optional ? " (optional)" : "", joined(dtypes).c_str(), port.help.c_str());
    }
    for (const Param &param : node.params) {
        std::printf("  param %s = %s (%s)\n        %s\n", param.key.c_str(), param.default_value.c_str(),
                    widget(param).c_str(), param.help.c_str());
    }
}

} // namespace

void print_catalog(const Library &library, const Catalog &catalog) {
    uint32_t abi = library.vvae_abi_version();
    std::printf("library %s %s, ABI %u.%u\n", library.path.c_str(), library.vvae_version ? library.vvae_version() : "",
                abi >> 16, abi & 0xffff);
    print_devices(library);
    for (const NodeType &node : catalog) print_node(node);
}

} // namespace host
