//! `vvae info`: what the library has, and what a checkpoint is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::api::*;
use crate::files::safetensors::Header;
use crate::json::JsonOptions;
use crate::say::say;
use crate::tensor::Dtype;
use crate::vae::{LatentFacts, Vae};
use crate::{Result, api, download, models, units};

/// Devices, nodes and parameters; a checkpoint's sizes and checksum.
///
/// Without a word after it: versions, devices, and the nodes with their ports and parameters. With a checkpoint: its
/// configuration, sizes and SHA-256.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  vvae info\n  vvae info ema_vae_fp16.safetensors\n")]
pub struct Info {
    checkpoint: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOptions,
}

impl Info {
    pub fn run(self) -> Result<()> {
        let json = self.json.open()?;
        let result = match &self.checkpoint {
            Some(path) => checkpoint(&models::resolve(path)?)?,
            None => {
                say!("{}\n\nDevices", api::versions()?)?;
                let (devices, (version, abi)) = (devices()?, api::version()?);
                let library = api()?.path.display().to_string();
                json!({
                    "version": version, "abi": abi, "library": library, "devices": devices, "nodes": nodes()?,
                })
            }
        };
        json.write("info", vec![result])
    }
}

/// The devices of this machine; the first is the one that `auto` means.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  vvae devices\n  vvae devices --json -\n")]
pub struct Devices {
    #[command(flatten)]
    json: JsonOptions,
}

impl Devices {
    pub fn run(self) -> Result<()> {
        let json = self.json.open()?;
        json.write("devices", devices()?)
    }
}

/// What a call of discovery answers; indices come from the count, so it does not fail.
fn described<T: Copy>(ask: impl FnOnce(*mut T) -> i32) -> Result<T> {
    let mut out = sized::<T>();
    if ask(&mut out) == VVAE_OK { Ok(out) } else { Err("the library contradicts itself; put a newer one there".into()) }
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

/// Says what there is, and gives it for programs.
fn devices() -> Result<Vec<Value>> {
    let all = list()?;
    for device in &all {
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
    Ok(all.iter().map(device_json).collect())
}

/// What only some devices have is null elsewhere.
fn device_json(device: &vvae_device_desc) -> Value {
    let kind = match device.device_type {
        VVAE_DEVICE_CUDA => "cuda",
        VVAE_DEVICE_VULKAN => "vulkan",
        _ => "cpu",
    };
    let capability = format!("{}.{}", device.compute_major, device.compute_minor);
    let uuid = Some(fixed_text(&device.uuid)).filter(|uuid| !uuid.is_empty());
    json!({
        "id": fixed_text(&device.id), "name": fixed_text(&device.name), "type": kind,
        "memory_total": device.memory_total, "memory_free": device.memory_free,
        "compute_capability": (kind == "cuda").then_some(capability), "uuid": uuid,
    })
}

/// Says what there is, and gives it for programs.
fn nodes() -> Result<Vec<Value>> {
    let (api, mut all) = (api()?, Vec::new());
    // SAFETY: takes nothing.
    for node in 0..unsafe { (api.vvae_node_count)() } {
        // SAFETY: the struct is as long as it says.
        let info: vvae_node_desc = described(|out| unsafe { (api.vvae_node_info)(node, out) })?;
        let (mut ports, mut parameters) = (Vec::new(), Vec::new());
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
            ports.push(json!({
                "name": text(port.name), "direction": direction, "kind": text(port.kind), "optional": port.optional == 1,
                "dtypes": names.split(", ").collect::<Vec<_>>(), "help": text(port.help),
            }));
        }
        say!("  parameters")?;
        // SAFETY: takes a number.
        for index in 0..unsafe { (api.vvae_param_count)(node) } {
            // SAFETY: the struct is as long as it says.
            let param: vvae_param_desc = described(|out| unsafe { (api.vvae_param_info)(node, index, out) })?;
            let (key, default) = (text(param.key), text(param.default_value));
            say!("    {key:<20} {default} ({})", accepted(api, node, index, &param))?;
            say!("    {:<20} {}", "", text(param.help))?;
            parameters.push(json!({
                "key": key, "default": default, "takes": accepted(api, node, index, &param), "help": text(param.help),
            }));
        }
        all.push(json!({
            "id": text(info.id), "label": text(info.label), "help": text(info.help), "ports": ports,
            "parameters": parameters,
        }));
    }
    Ok(all)
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

/// Says what a checkpoint is, and gives it for programs.
fn checkpoint(path: &Path) -> Result<Value> {
    let name = path.display();
    // The library first: it checks the file whole, and names the tensor where something is wrong.
    let vae = Vae::open(path, "auto")?;
    let (model, latents) = (vae.model(), vae.latents());
    let (header, described) = (Header::read(path)?, crate::checkpoint::model(path)?);
    let mut dtypes: BTreeMap<&str, u64> = BTreeMap::new();
    for entry in header.tensors.values() {
        *dtypes.entry(&entry.dtype).or_default() += 1;
    }
    let words: Vec<_> = dtypes.iter().map(|(dtype, count)| format!("{dtype} ({count} tensors)")).collect();
    let parameters: u64 = header.tensors.values().map(|entry| entry.elements()).sum();
    let arithmetic = arithmetic(&vae)?;
    let sum = download::sha256(path).map_err(|why| format!("{name} cannot be read: {why}"))?;
    say!("{name}")?;
    say!("  family          {}", vae.family())?;
    say!("  sizes           {}", described.sizes)?;
    say!("  pixels          {}", pixels(&model))?;
    say!("  latent          {} channels", model.latent_channels)?;
    say!("  space           1 latent pixel for {0} x {0} pixels", model.spatial_scale)?;
    match model.time_scale {
        1 => say!("  time            1 latent frame for 1 frame")?,
        frames => say!("  time            1 latent frame for {frames} frames, after the first")?,
    }
    say!("  latents=model   {latents}")?;
    say!("  arithmetic      {arithmetic}")?;
    say!("  tensors         {}", header.tensors.len())?;
    say!("  parameters      {}", units::grouped(parameters))?;
    say!("  dtype           {}", words.join(", "))?;
    say!("  size            {} bytes", units::grouped(header.file_bytes))?;
    say!("  sha-256         {sum}")?;
    Ok(json!({
        "checkpoint": path.display().to_string(), "family": vae.family(), "sizes": described.sizes.to_string(),
        "pixel_channels": model.pixel_channels, "decoded_channels": model.decoded_channels,
        "latent_channels": model.latent_channels, "spatial_scale": model.spatial_scale,
        "time_scale": model.time_scale, "latents": latent_facts(&latents), "arithmetic": arithmetic, "tensors": header.tensors.len(),
        "parameters": parameters, "dtypes": dtypes, "bytes": header.file_bytes, "sha256": sum,
    }))
}

fn latent_facts(latents: &LatentFacts) -> Value {
    json!({
        "known": latents.known, "format": latents.format, "formats": latents.formats, "packing": latents.packing,
        "channels": latents.channels, "scale": latents.scale, "shift": latents.shift, "means": latents.means,
        "deviations": latents.deviations,
    })
}

fn pixels(model: &vvae_model_desc) -> String {
    let (encoded, decoded) = (model.pixel_channels, model.decoded_channels);
    if encoded == decoded {
        format!("{encoded} channels")
    } else {
        format!("{encoded} channels encoded, {decoded} decoded")
    }
}

/// Device, instructions and precision of a handle as it is opened: the text of every plan says it.
fn arithmetic(vae: &Vae) -> Result<String> {
    let (_, text) = vae.plan("decode", [1, i64::from(vae.model().latent_channels), 1, 1, 1])?;
    let line = text.lines().find_map(|line| line.strip_prefix("arithmetic: "));
    Ok(line.unwrap_or("not known; put a newer library there").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_the_type_of_a_device() {
        let of = |device_type| device_json(&vvae_device_desc { device_type, ..sized() });
        assert_eq!(of(VVAE_DEVICE_VULKAN)["type"], "vulkan");
        assert!(of(VVAE_DEVICE_VULKAN)["compute_capability"].is_null() && of(VVAE_DEVICE_VULKAN)["uuid"].is_null());
        assert_eq!(of(VVAE_DEVICE_CUDA)["compute_capability"], "0.0");
        assert_eq!(of(VVAE_DEVICE_CPU)["type"], "cpu");
    }
}
