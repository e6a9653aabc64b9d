//! Discovery: versions, devices, nodes. Nodes are static data: no driver call, no allocation, any thread. This file
//! becomes a part of the header.

use std::ffi::{CStr, c_char};

use super::handle::device_place;
use super::types::*;
use super::{guard, sized, text};
use crate::backend::{self, DeviceInfo};
use crate::error::{Error, Result};
use crate::node::{NODES, Node, Param, ParamKind};

/// ---- Discovery ----
///
/// VVAE_ABI_VERSION of the library. [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_abi_version() -> u32 {
    VVAE_ABI_VERSION
}

/// The version of the library, such as "1.2.3". [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Number of devices, the CPU included. [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_device_count() -> u32 {
    guard::value(0, || backend::devices().len() as u32)
}

/// A device, by an index below vvae_device_count. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_device_info(index: u32, out: *mut vvae_device_desc) -> i32 {
    guard::call(|| {
        let devices = backend::devices();
        let device = item("index", &devices, index)?;
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::write("out", out, describe_device(device)) }
    })
}

/// Number of nodes. [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_node_count() -> u32 {
    NODES.len() as u32
}

/// A node, by an index below vvae_node_count. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_node_info(node: u32, out: *mut vvae_node_desc) -> i32 {
    guard::call(|| {
        let node = item("node", NODES, node)?;
        let info = vvae_node_desc {
            struct_size: 0,
            reserved: 0,
            id: node.id.as_ptr(),
            label: node.label.as_ptr(),
            help: node.help.as_ptr(),
        };
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::write("out", out, info) }
    })
}

/// Number of ports of a node; 0 if there is no such node. [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_port_count(node: u32) -> u32 {
    guard::value(0, || NODES.get(node as usize).map_or(0, |n| n.ports.len() as u32))
}

/// A port of a node, by an index below vvae_port_count. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_port_info(node: u32, port: u32, out: *mut vvae_port_desc) -> i32 {
    guard::call(|| {
        let port = item("port", item("node", NODES, node)?.ports, port)?;
        let dtypes = port.kind.dtypes();
        let info = vvae_port_desc {
            struct_size: 0,
            direction: if port.output { VVAE_PORT_OUTPUT } else { VVAE_PORT_INPUT },
            optional: u32::from(port.optional),
            dtype_count: dtypes.len() as u32,
            // The enum has the representation of its number.
            dtypes: dtypes.as_ptr().cast(),
            name: port.name.as_ptr(),
            kind: port.kind.c_name().as_ptr(),
            help: port.help.as_ptr(),
        };
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::write("out", out, info) }
    })
}

/// Number of parameters of a node; 0 if there is no such node. [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_param_count(node: u32) -> u32 {
    guard::value(0, || NODES.get(node as usize).map_or(0, |n| n.params().count() as u32))
}

/// A parameter of a node, by an index below vvae_param_count. A key that both nodes have is one setting of the handle.
/// [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_param_info(node: u32, param: u32, out: *mut vvae_param_desc) -> i32 {
    guard::call(|| {
        let node = item("node", NODES, node)?;
        let param = find_param(node, param).ok_or_else(|| no_such("param", param, node.params().count()))?;
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::write("out", out, describe_param(param)) }
    })
}

/// Number of words of a choice parameter; 0 for others, and if there is no such parameter. [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_choice_count(node: u32, param: u32) -> u32 {
    guard::value(0, || choices(node, param).len() as u32)
}

/// A word of a choice parameter; NULL if there is no such word. [any-thread]
#[unsafe(no_mangle)]
pub extern "C" fn vvae_choice(node: u32, param: u32, choice: u32) -> *const c_char {
    guard::value(std::ptr::null(), || {
        choices(node, param).get(choice as usize).map_or(std::ptr::null(), |word| word.as_ptr())
    })
}

fn item<'a, T>(argument: &str, items: &'a [T], index: u32) -> Result<&'a T> {
    items.get(index as usize).ok_or_else(|| no_such(argument, index, items.len()))
}

fn no_such(argument: &str, index: u32, count: usize) -> Error {
    Error::Argument(format!("{argument}: there is no number {index}; there are {count}, from 0 on"))
}

fn find_param(node: &Node, index: u32) -> Option<&'static Param> {
    node.params().nth(index as usize)
}

fn choices(node: u32, param: u32) -> &'static [&'static CStr] {
    let param = NODES.get(node as usize).and_then(|n| find_param(n, param));
    param.map_or(&[], Param::choices)
}

fn describe_device(device: &DeviceInfo) -> vvae_device_desc {
    let (device_type, device_id) = device_place(device.place);
    vvae_device_desc {
        struct_size: 0,
        device_type,
        device_id,
        id: text::array(&device.place.to_string()),
        name: text::array(&device.name),
        memory_total: device.memory_total,
        memory_free: device.memory_free,
        uuid: text::array(&device.uuid),
        compute_major: device.compute_capability.0,
        compute_minor: device.compute_capability.1,
    }
}

fn describe_param(param: &Param) -> vvae_param_desc {
    const NO_RANGE: [f64; 3] = [0.0; 3];
    let whole = |min: u64, max: u64, step: u64| [min as f64, max as f64, step as f64];
    let (kind, auto, range) = match param.kind {
        ParamKind::Int { auto, min, max, step } => (VVAE_PARAM_INT, auto, whole(min, max, step)),
        ParamKind::Float { min, max, step } => (VVAE_PARAM_FLOAT, false, [min, max, step]),
        ParamKind::Bool => (VVAE_PARAM_BOOL, false, NO_RANGE),
        ParamKind::Choice(_) => (VVAE_PARAM_CHOICE, false, NO_RANGE),
        ParamKind::Bytes { min, max, step, .. } => (VVAE_PARAM_BYTES, true, whole(min, max, step)),
        ParamKind::Rates { .. } => (VVAE_PARAM_TEXT, true, NO_RANGE),
        ParamKind::Path => (VVAE_PARAM_TEXT, false, NO_RANGE),
    };
    let [min, max, step] = range;
    let has_auto = if auto { VVAE_PARAM_HAS_AUTO } else { 0 };
    let has_range = if range == NO_RANGE { 0 } else { VVAE_PARAM_HAS_RANGE };
    vvae_param_desc {
        struct_size: 0,
        kind,
        flags: has_auto | has_range,
        choice_count: param.choices().len() as u32,
        key: param.key.as_ptr(),
        default_value: param.default.as_ptr(),
        unit: param.unit.as_ptr(),
        help: param.help.as_ptr(),
        min,
        max,
        step,
    }
}
