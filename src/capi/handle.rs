//! Handles: create, configure, query, free. This file becomes a part of the header.

use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::atomic::Ordering;

use super::facts::ModelFacts;
use super::log::Log;
use super::number::{check_place, signed};
use super::table::{self, FinishedRun, Handle};
use super::types::*;
use super::{cancel, guard, sized, text};
use crate::backend::{Allocator, Callbacks};
use crate::error::{Error, Result};
use crate::exec::{self, Allocators, DeviceName, Opening, Trim};
use crate::ir::TensorDevice;
use crate::model::Checkpoint;
use crate::node;
use crate::report::{Part, Trace};

/// Opens a checkpoint on a device, or on several that divide the work. The whole file is checked, which reads it once;
/// `progress` can cancel it. The first run loads the weights; handles of the same file on the same device share them.
/// On failure `*v` is NULL, and vvae_error(NULL, ...) gives the text. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_create(info: *const vvae_create_info, v: *mut *mut vvae) -> i32 {
    guard::call(|| {
        let out = v;
        check_place("v", out, "the handle")?;
        // SAFETY: the host vouches for a pointer that is not null.
        unsafe { out.write_unaligned(std::ptr::null_mut()) };
        guard::check_caller()?;
        let creation = guard::Creation::begin();
        // SAFETY: the host vouches for a struct as long as it says.
        let info = unsafe { sized::read("info", info) }?;
        check_version(info.abi_version)?;
        // SAFETY: the host vouches for a NUL-terminated text.
        let weights = unsafe { text::read("weights", info.weights) }?;
        // SAFETY: as above.
        let device = if info.device.is_null() { "auto" } else { unsafe { text::read("device", info.device) }? };
        let log = Log { callback: info.log, user: info.log_user };
        let (opened, facts) = parse_devices(device)
            .and_then(|devices| {
                let checkpoint = Checkpoint::open_watched(Path::new(weights), &mut |done, total| {
                    // SAFETY: the host vouches for its callback and user pointer.
                    info.progress
                        .is_some_and(|tell| unsafe { tell(info.progress_user, done, total, c"check".as_ptr()) } != 0)
                })?;
                let facts = ModelFacts::of(&checkpoint)?;
                let (allocators, settings) = (allocators(&info)?, node::defaults());
                let opening = Opening { checkpoint: &checkpoint, allocators, settings };
                Ok((exec::open(&devices, opening, &log)?, facts))
            })
            .inspect_err(|error| log.failure(error))?;
        log.write(VVAE_LOG_INFO, format_args!("opened {weights} on {device}: {}", opened.model().sizes));
        // SAFETY: as above.
        unsafe { out.write_unaligned(table::insert(Handle::new(opened, facts, log))) };
        creation.succeed();
        Ok(VVAE_OK)
    })
}

/// Sets one parameter, such as "memory_limit" to "8GiB". vvae_param_info lists keys and values. The value is checked at
/// once; a failure changes nothing. It applies from the next run on; open streams keep their settings. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_configure(v: *mut vvae, key: *const c_char, value: *const c_char) -> i32 {
    guard::exclusive(v, |handle, open| {
        // SAFETY: the host vouches for NUL-terminated texts.
        let (key, value) = unsafe { (text::read("key", key)?, text::read("value", value)?) };
        let mut settings = open.model.settings().clone();
        let before = settings.trace.clone();
        node::configure(&mut settings, key, value)?;
        let trace = settings.trace.clone();
        trace.as_ref().map_or(Ok(()), Trace::open)?;
        open.model.configure(settings)?;
        *handle.latent_format.lock() = open.model.settings().latent_format;
        before.filter(|before| trace.as_ref() != Some(before)).map_or(Ok(()), |before| before.finish())?;
        Ok(VVAE_OK)
    })
}

/// Closes a handle and its streams and frees their memory. Fails, and closes nothing, while a call on the handle is
/// running: cancel it first. NULL does nothing. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_free(v: *mut vvae) -> i32 {
    if v.is_null() {
        return VVAE_OK;
    }
    guard::any_time(v, |handle| {
        let mut slot = handle.lock()?;
        handle.close_log()?;
        table::remove(handle);
        let open = slot.take();
        drop(slot);
        drop(open);
        Ok(VVAE_OK)
    })
}

/// The sizes of the model, and what is known of its latents. latent_format decides the latter, if several models may
/// be meant; no other setting changes anything here. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_model_info(v: *mut vvae, out: *mut vvae_model_desc) -> i32 {
    guard::intact(v, |handle| {
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::write("out", out, handle.facts.describe(&handle.model, *handle.latent_format.lock())) }
    })
}

/// Stops the encode, decode or pull, or the opening of a stream, that is running on the handle, within one chunk of
/// work: it returns VVAE_ERROR_CANCELLED, and the handle can be used again. A call is running from when it makes other
/// calls fail with VVAE_ERROR_STATE until it returns; no cancel in that time is lost. A cancel at any other time does
/// nothing, also to the next call. Safe in a signal handler, and in a callback of the library, while the handle is
/// open. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_cancel(v: *mut vvae) -> i32 {
    // A signal handler gets no further than this: the rest locks and allocates.
    if !guard::is_forked() && cancel::request(v.addr()) {
        return VVAE_OK;
    }
    guard::intact(v, |_| Ok(VVAE_OK))
}

/// Copies the text of the last failure of this handle and its streams. With NULL, or a handle that cannot be used: of
/// the calling thread. The text is cut to `capacity` bytes and always ends with a NUL. Returns the length of the whole
/// text without the NUL; `text` may be NULL. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_error(v: *mut vvae, text: *mut c_char, capacity: u64) -> i64 {
    guard::value(i64::from(VVAE_ERROR_INTERNAL), || {
        let handle = guard::check_caller().and_then(|()| table::find(v));
        let message = handle.map_or_else(|_| text::last_error(), |handle| handle.error.lock().clone());
        // SAFETY: the host vouches for a buffer of this capacity.
        unsafe { text::write(&message, text, capacity) as i64 }
    })
}

/// The memory that the handle holds, also while a call is running. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_memory(v: *mut vvae, out: *mut vvae_memory_info) -> i32 {
    guard::intact(v, |handle| {
        let memory = handle.ledger.figures();
        let info = vvae_memory_info {
            struct_size: 0,
            streams: handle.streams.load(Ordering::Relaxed),
            now: memory.now,
            peak: memory.peak,
            reserved: memory.reserved,
            host: memory.host,
        };
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::write("out", out, info) }
    })
}

/// What device `index` of the handle holds, and its part of the last plan or finished run. vvae_memory and vvae_plan
/// give the sums. A handle with one device has index 0 only. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_handle_device(v: *mut vvae, index: u32, out: *mut vvae_handle_device_info) -> i32 {
    guard::intact(v, |handle| {
        let (count, ledgers) = (handle.devices.len(), handle.ledger.devices());
        let (Some(place), Some(ledger)) = (handle.devices.get(index as usize), ledgers.get(index as usize)) else {
            return Err(Error::Argument(format!("index: there is no device {index}; there are {count}, from 0 on")));
        };
        let ((device_type, device_id), memory) = (device_place(*place), ledger.figures());
        let mut info = vvae_handle_device_info {
            struct_size: 0,
            device_count: count as u32,
            device_type,
            device_id,
            id: text::array(&place.to_string()),
            unused: 0,
            now: memory.now,
            peak: memory.peak,
            reserved: memory.reserved,
            host: memory.host,
            device_bytes: 0,
            host_bytes: 0,
            first_clip: 0,
            first_frame: 0,
            frames: 0,
            seconds: 0.0,
            measured_seconds: 0.0,
        };
        if let Some(job) = &*handle.last_job.lock() {
            add_job(&mut info, job, index as usize);
        }
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::write("out", out, info) }
    })
}

/// Adds one device's part of a job: all of it, unless several devices divide it.
fn add_job(info: &mut vvae_handle_device_info, job: &FinishedRun, index: usize) {
    let FinishedRun { plan, seconds } = job;
    match plan.division.as_ref().and_then(|division| division.devices.get(index)) {
        None => {
            (info.device_bytes, info.host_bytes) = (plan.device_bytes, plan.host_bytes);
            info.first_frame = signed(plan.range.first);
            info.frames = signed(plan.output.batch * plan.output.frames);
            (info.seconds, info.measured_seconds) = (plan.seconds, *seconds);
        }
        Some(device) => {
            info.unused = u32::from(device.unused.is_some());
            (info.device_bytes, info.host_bytes) = (device.device_bytes, device.host_bytes);
            if let Some(first) = device.parts.first() {
                (info.first_clip, info.first_frame) = (signed(first.clips.start), signed(first.frames.start));
            }
            info.frames = signed(device.parts.iter().map(Part::all_frames).sum());
            (info.seconds, info.measured_seconds) = (device.seconds, device.measured_seconds);
        }
    }
}

/// device_type and device_id of a device.
pub(super) fn device_place(place: TensorDevice) -> (i32, i32) {
    match place {
        TensorDevice::Cpu => (VVAE_DEVICE_CPU, 0),
        TensorDevice::Cuda(index) => (VVAE_DEVICE_CUDA, index as i32),
        TensorDevice::Vulkan(index) => (VVAE_DEVICE_VULKAN, index as i32),
    }
}

/// Frees memory that is kept for the next call: VVAE_TRIM_WORKSPACE, VVAE_TRIM_WEIGHTS or both. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_trim(v: *mut vvae, what: u32) -> i32 {
    guard::exclusive(v, |_, open| {
        if what == 0 || what & !(VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS) != 0 {
            return Err(Error::Argument(format!(
                "what: {what:#x} is not accepted; it must be VVAE_TRIM_WORKSPACE (1), VVAE_TRIM_WEIGHTS (2) or both (3)"
            )));
        }
        let has = |flag| what & flag != 0;
        open.model.trim(Trim { workspace: has(VVAE_TRIM_WORKSPACE), weights: has(VVAE_TRIM_WEIGHTS) });
        Ok(VVAE_OK)
    })
}

fn check_version(theirs: u32) -> Result<()> {
    let (major, minor) = (theirs >> 16, theirs & 0xffff);
    if major == VVAE_ABI_MAJOR {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "abi_version: the host was built for ABI {major}.{minor}, but this library ({}) has ABI \
         {VVAE_ABI_MAJOR}.{VVAE_ABI_MINOR}; set it to VVAE_ABI_VERSION and build the host with this library's header",
        env!("CARGO_PKG_VERSION")
    )))
}

/// More entries than any machine has devices.
const MOST_DEVICES: usize = 256;

/// One device, or a list.
fn parse_devices(text: &str) -> Result<Vec<DeviceName>> {
    let devices = text.split(',').map(parse_device).collect::<Result<Vec<_>>>()?;
    if devices.len() > 1 && devices.contains(&DeviceName::Auto) {
        return Err(Error::Device(format!("device: \"{text}\": \"auto\" is one device; name every device of a list")));
    }
    if devices.len() > MOST_DEVICES {
        return Err(Error::Device(format!("device: a list of {}; the most is {MOST_DEVICES}", devices.len())));
    }
    Ok(devices)
}

fn parse_device(text: &str) -> Result<DeviceName> {
    match text {
        "auto" => return Ok(DeviceName::Auto),
        "cpu" => return Ok(DeviceName::Place(TensorDevice::Cpu)),
        "cuda:*" => return Ok(DeviceName::AllCuda),
        _ => {}
    }
    let index = |prefix: &str| {
        let digits = text.strip_prefix(prefix).filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
        digits.and_then(|n| n.parse().ok())
    };
    let place = index("cuda:").map(TensorDevice::Cuda).or_else(|| index("vulkan:").map(TensorDevice::Vulkan));
    place.map(DeviceName::Place).ok_or_else(|| {
        Error::Device(format!(
            "device: \"{text}\" is unknown; it must be \"auto\", \"cpu\" or \"cuda:0\", \"cuda:1\", ..., \"cuda:*\" for \
             all of these, \"vulkan:0\", ..., or a list such as \"cuda:0,cuda:1\""
        ))
    })
}

fn allocators(info: &vvae_create_info) -> Result<Allocators> {
    Ok(Allocators {
        host: allocator("alloc and free", info.alloc, info.free, info.alloc_user)?,
        device: allocator("device_alloc and device_free", info.device_alloc, info.device_free, info.device_alloc_user)?,
    })
}

fn allocator<A, F>(names: &str, alloc: Option<A>, free: Option<F>, user: *mut c_void) -> Result<Allocator<A, F>> {
    match (alloc, free) {
        (None, None) => Ok(Allocator::System),
        (Some(alloc), Some(free)) => Ok(Allocator::Host(Callbacks { alloc, free, user })),
        _ => Err(Error::Argument(format!("{names} must be given together, or both be null"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed_or_refused() {
        assert_eq!(parse_device("auto"), Ok(DeviceName::Auto));
        assert_eq!(parse_device("cuda:11"), Ok(DeviceName::Place(TensorDevice::Cuda(11))));
        assert_eq!(parse_device("vulkan:1"), Ok(DeviceName::Place(TensorDevice::Vulkan(1))));
        for text in
            ["", "CPU", "vulkan", "vulkan:*", "cuda", "cuda:", "cuda:+1", "cuda:-1", "cuda:4294967296", "cpu:0", " cpu"]
        {
            let error = parse_device(text).unwrap_err().to_string();
            assert!(error.contains(&format!("\"{text}\"")) && error.contains("\"cpu\""), "{error}");
        }
    }

    #[test]
    fn lists_of_devices_are_parsed_or_refused() {
        let [cpu, gpu] = [TensorDevice::Cpu, TensorDevice::Cuda(3)].map(DeviceName::Place);
        assert_eq!(parse_devices("cuda:*,cpu,cuda:3"), Ok(vec![DeviceName::AllCuda, cpu, gpu]));
        let many = vec!["cpu"; 257].join(",");
        for text in ["cpu,", ",cpu", "cpu,,cpu", "cpu, cpu", "cpu;cpu", "auto,cpu", "cpu,auto", "cuda:*:1", &*many] {
            assert!(matches!(parse_devices(text), Err(Error::Device(_))), "{text}");
        }
    }
}
