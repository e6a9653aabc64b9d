//! `vvae info`: what the library has, and what a checkpoint is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::api::*;
use crate::files::safetensors::Header;
use crate::say::say;
use crate::tensor::Dtype;
use crate::vae::Vae;
use crate::{Result, api, download, models, units};

/// Devices, nodes and parameters; a checkpoint's sizes and checksum.
///
/// Without a word after it: versions, devices, and the nodes with their ports and parameters. With a checkpoint: its
/// configuration, sizes and SHA-256.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  vvae info\n  vvae info ema_vae_fp16.safetensors\n")]
pub struct Info {
    checkpoint: Option<PathBuf>,
}

impl Info {
    pub fn run(self) -> Result<()> {
        if let Some(path) = &self.checkpoint {
            return checkpoint(&models::resolve(path)?);
        }
        say!("{}\n\nDevices", api::versions()?)?;
        devices()?;
        nodes()
    }
}

/// What a call of discovery answers; indices come from the count, so it does not fail.
fn described<T: Copy>(ask: impl FnOnce(*mut T) -> i32) -> Result<T> {
    let mut out = sized::<T>();
    if ask(&mut out) == VVAE_OK { Ok(out) } else { Err("the library contradicts itself; put a newer one there".into()) }
}

pub fn fixed_text(bytes: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().take_while(|b| **b != 0).map(|b| *b as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// All devices; the first is the one that "auto" means.
fn list() -> Result<Vec<vvae_device_desc>> {
    let api = api()?;
    // SAFETY: takes nothing.
    let count = unsafe { (api.vvae_device_count)() };
    // SAFETY: the struct is as long as it says.
    (0..count).map(|index| described(|out| unsafe { (api.vvae_device_info)(index, out) })).collect()
}

/// The name of the hardware that an option of devices stands for.
pub fn device_name(option: &str) -> Result<String> {
    let devices = list()?;
    let found = devices.iter().find(|device| fixed_text(&device.id) == option).or(devices.first());
    Ok(found.map_or_else(|| option.to_owned(), |device| fixed_text(&device.name)))
}

fn devices() -> Result<()> {
    for device in list()? {
        let gpu = match device.device_type {
            VVAE_DEVICE_CUDA => format!(
                ", compute capability {}.{}, {}",
                device.compute_major,
                device.compute_minor,
                fixed_text(&device.uuid)
            ),
            _ => String::new(),
        };
        say!(
            "  {:<8} {}{gpu}, {} of {} free",
            fixed_text(&device.id),
            fixed_text(&device.name),
            units::bytes(device.memory_free),
            units::bytes(device.memory_total)
        )?;
    }
    Ok(())
}

fn nodes() -> Result<()> {
    let api = api()?;
    // SAFETY: takes nothing.
    for node in 0..unsafe { (api.vvae_node_count)() } {
        // SAFETY: the struct is as long as it says.
        let info: vvae_node_desc = described(|out| unsafe { (api.vvae_node_info)(node, out) })?;
        say!("\nNode {} ({})\n  {}\n  ports", text(info.id), text(info.label), text(info.help))?;
        // SAFETY: takes a number.
        for index in 0..unsafe { (api.vvae_port_count)(node) } {
            // SAFETY: the struct is as long as it says.
            let port: vvae_port_desc = described(|out| unsafe { (api.vvae_port_info)(node, index, out) })?;
            // SAFETY: the library gives this many, valid for ever.
            let dtypes = unsafe { std::slice::from_raw_parts(port.dtypes, port.dtype_count as usize) };
            let names = dtypes.iter().filter_map(|code| Dtype::from_code(*code)).map(Dtype::name);
            let names = names.collect::<Vec<_>>().join(", ").to_lowercase();
            let direction = if port.direction == VVAE_PORT_INPUT { "in" } else { "out" };
            let optional = if port.optional == 1 { ", optional" } else { "" };
            say!("    {:<20} {direction} ({}{optional}; {names})", text(port.name), text(port.kind))?;
            say!("    {:<20} {}", "", text(port.help))?;
        }
        say!("  parameters")?;
        // SAFETY: takes a number.
        for index in 0..unsafe { (api.vvae_param_count)(node) } {
            // SAFETY: the struct is as long as it says.
            let param: vvae_param_desc = described(|out| unsafe { (api.vvae_param_info)(node, index, out) })?;
            let (key, default) = (text(param.key), text(param.default_value));
            say!("    {key:<20} {default} ({})", accepted(api, node, index, &param))?;
            say!("    {:<20} {}", "", text(param.help))?;
        }
    }
    Ok(())
}

/// The words that a parameter takes.
pub fn choices(key: &str) -> Result<Vec<&'static str>> {
    let (api, node) = (api()?, 0);
    // SAFETY: takes a number.
    for index in 0..unsafe { (api.vvae_param_count)(node) } {
        // SAFETY: the struct is as long as it says.
        let param: vvae_param_desc = described(|out| unsafe { (api.vvae_param_info)(node, index, out) })?;
        if text(param.key) == key {
            return Ok(words_of(api, node, index));
        }
    }
    Err(format!("the library has no parameter {key}; put a newer one there"))
}

fn words_of(api: &Api, node: u32, index: u32) -> Vec<&'static str> {
    // SAFETY: takes numbers.
    let choice = |i| text(unsafe { (api.vvae_choice)(node, index, i) });
    // SAFETY: as above.
    let count = unsafe { (api.vvae_choice_count)(node, index) };
    (0..count).map(choice).collect()
}

/// What a parameter takes, in words.
fn accepted(api: &Api, node: u32, index: u32, param: &vvae_param_desc) -> String {
    let mut words = match param.kind {
        VVAE_PARAM_INT => "whole number".to_owned(),
        VVAE_PARAM_FLOAT => "number".to_owned(),
        VVAE_PARAM_BOOL => "true or false".to_owned(),
        VVAE_PARAM_BYTES => "bytes, such as 8GiB".to_owned(),
        VVAE_PARAM_TEXT => "text".to_owned(),
        VVAE_PARAM_CHOICE => words_of(api, node, index).join(", "),
        _ => "of a kind newer than this command".to_owned(),
    };
    if param.flags & VVAE_PARAM_HAS_RANGE != 0 && matches!(param.kind, VVAE_PARAM_INT | VVAE_PARAM_FLOAT) {
        // The largest number that fits says nothing to people.
        let any = param.kind == VVAE_PARAM_INT && param.max >= 9e18;
        words +=
            &if any { format!(", {} or more", param.min) } else { format!(" from {} to {}", param.min, param.max) };
    }
    if !text(param.unit).is_empty() && param.kind != VVAE_PARAM_BYTES {
        words += &format!(" of {}", text(param.unit));
    }
    if param.flags & VVAE_PARAM_HAS_AUTO != 0 {
        words += ", or auto";
    }
    words
}

fn checkpoint(path: &Path) -> Result<()> {
    let name = path.display();
    // The library first: it checks the file whole, and names the tensor where something is wrong.
    let vae = Vae::open(path, "auto")?;
    let model = vae.model;
    let (header, described) = (Header::read(path)?, crate::checkpoint::model(path)?);
    let mut dtypes: BTreeMap<&str, u64> = BTreeMap::new();
    for entry in header.tensors.values() {
        *dtypes.entry(&entry.dtype).or_default() += 1;
    }
    let dtypes: Vec<_> = dtypes.iter().map(|(dtype, count)| format!("{dtype} ({count} tensors)")).collect();
    let parameters = header.tensors.values().map(|entry| entry.elements()).sum();
    let sum = download::sha256(path).map_err(|why| format!("{name} cannot be read: {why}"))?;
    say!("{name}")?;
    say!("  family          {}", described.family.name)?;
    say!("  sizes           {}", described.sizes)?;
    say!("  latent          {} channels", model.latent_channels)?;
    say!("  space           1 latent pixel for {0} x {0} pixels", model.spatial_scale)?;
    say!("  time            1 latent frame for {} frames, after the first", model.time_scale)?;
    say!("  arithmetic      {}", arithmetic(&vae)?)?;
    say!("  tensors         {}", header.tensors.len())?;
    say!("  parameters      {}", units::grouped(parameters))?;
    say!("  dtype           {}", dtypes.join(", "))?;
    say!("  size            {} bytes", units::grouped(header.file_bytes))?;
    say!("  sha-256         {sum}")
}

/// Device, instructions and precision of a handle as it is opened: the text of every plan says it.
fn arithmetic(vae: &Vae) -> Result<String> {
    let (_, text) = vae.plan("decode", [1, i64::from(vae.model.latent_channels), 1, 1, 1])?;
    let line = text.lines().find_map(|line| line.strip_prefix("arithmetic: "));
    Ok(line.unwrap_or("not known; put a newer library there").to_owned())
}
