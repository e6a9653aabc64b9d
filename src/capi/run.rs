//! Whole clips: encode, decode, their plans and reports. This file becomes a part of the header.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char};
use std::time::Instant;

use super::number::{check_place, signed};
use super::table::{FinishedRun, Handle};
use super::types::*;
use super::{guard, sized, tensor, text};
use crate::backend::HostStream;
use crate::error::{Error, Result};
use crate::exec::{Call, ClipRange, Control, Extent, JobShape, Outputs, Progress};
use crate::ir::{Shape, View};
use crate::model::Direction;
use crate::node;
use crate::report::PlanReport;

/// Video to latent. vvae_model_desc gives the latent's shape. Lengths other than 4n+1, and sizes that are not a
/// multiple of 8, are padded by repeating the last frame, row and column. `run` may be NULL. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_encode(
    v: *mut vvae,
    video: *const vvae_tensor,
    latent: *const vvae_tensor,
    run: *const vvae_run_info,
) -> i32 {
    // SAFETY: the host vouches for its tensors and its run info.
    unsafe { run_call(v, Direction::Encode, ("video", video), ("latent", latent), None, run) }
}

/// Latent to video. The video may be up to time_scale - 1 frames shorter and spatial_scale - 1 rows or columns smaller
/// than the latent implies: what encode padded is cropped. `run` may be NULL. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_decode(
    v: *mut vvae,
    latent: *const vvae_tensor,
    video: *const vvae_tensor,
    run: *const vvae_run_info,
) -> i32 {
    // SAFETY: the host vouches for its tensors and its run info.
    unsafe { run_call(v, Direction::Decode, ("latent", latent), ("video", video), None, run) }
}

/// Plans a job under the present settings. `node` is "encode" or "decode". `shape` is that of the input, five numbers;
/// 0 frames stand for a stream. `text`, which may be NULL, gets the plan in words, cut to `capacity` bytes with its
/// NUL. Planned are up to 65536 clips (a stream: 256) of 2^32 frames of 131072 x 131072 pixels, with up to 16384 tiles
/// of all clips together; more is refused. A plan takes a second at most on two cores, and ends within 50 ms of
/// vvae_cancel. With autotune=on the first plan takes about 2 s more. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_plan(
    v: *mut vvae,
    node: *const c_char,
    shape: *const i64,
    out: *mut vvae_plan_info,
    text: *mut c_char,
    capacity: u64,
) -> i32 {
    // SAFETY: the host vouches for its texts, numbers and struct.
    unsafe { plan_call(v, node, shape, None, out, Words { text, capacity }) }
}

/// The plan of vvae_plan as a timeline, for pictures: JSON in UTF-8, with an object for each device that has a part.
/// `text`, which may be NULL, gets it, cut to `capacity` bytes with its NUL; `*length` is the length of the whole. Call
/// again with a larger buffer if that is not below `capacity`. At most some thousand steps are described, from the
/// first on; "complete" says whether these are all. [handle]
///
///     {"devices": [{
///       "device": "cuda:0", "absent": null, "node": "decode", "input": [1, 16, 21, 135, 240], "output": [1, 3, 81, 1080, 1920],
///       "exact": true, "tiles": [1, 1], "seconds": 3.6, "device_bytes": 6342836224, "host_bytes": 9215926272,
///       "limit_bytes": 6442450944, "host_limit_bytes": 118111600640, "text": "decode ...",
///       "complete": false, "frames_shown": 60, "seconds_shown": 2.6,
///       "steps": [{"name": "conv decoder.conv_in", "stage": 0, "frames": 1, "start": 0.0, "seconds": 0.001,
///                  "waited": 0.0, "bytes_up": 0, "bytes_down": 0, "copies_start": 0.0}, ...],
///       "slots": [{"memory": "device", "content": "activations", "offset": 250613760, "bytes": 33177600, "first": 0,
///                  "last": 2}, ...],
///       "fixed": [{"memory": "device", "content": "weights", "offset": 0, "bytes": 250613760}, ...]}]}
///
/// "absent" is null, or the name of the card that device_like names: all times are estimates by its published rates.
/// Steps run one after the other from their estimated "start" on. Of "seconds", "waited" are spent waiting for weights.
/// Copies of bytes_up to the device and bytes_down to host memory run beside them from "copies_start" on. A slot holds
/// its content from the start of step "first" to the end of step "last". Offsets count as if all blocks of a memory
/// lay side by side. Contents are "activations", "causal cache", "partial sums", "weights", "scratch", "band buffers",
/// "staging" and "page tables"; later versions may have more, and more fields.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_plan_timeline(
    v: *mut vvae,
    node: *const c_char,
    shape: *const i64,
    text: *mut c_char,
    capacity: u64,
    length: *mut u64,
) -> i32 {
    guard::exclusive(v, |handle, open| {
        // SAFETY: the host vouches for its text and numbers.
        let (direction, input) = unsafe { node_and_shape(node, shape, false) }?;
        check_place("length", length, "the number")?;
        let job = JobShape { direction, input, extent: clip_or_stream(input) };
        let mut devices = Vec::new();
        open.model.plan(&job, Some(&mut devices), handle.cancel_flag())?;
        let json = serde_json::json!({ "devices": devices }).to_string();
        // SAFETY: the host vouches for a buffer of this capacity, and for the number.
        unsafe { length.write_unaligned(text::write(&json, text, capacity)) };
        Ok(VVAE_OK)
    })
}

/// Reports the last run that finished on the handle: an encode, a decode, or a pull that wrote frames. Runs that failed
/// or were cancelled do not count. `text`, which may be NULL, gets the plan of the run in words, cut to `capacity`
/// bytes with its NUL. VVAE_ERROR_STATE if no run has finished yet. [any-thread]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_last_run(
    v: *mut vvae,
    out: *mut vvae_run_report,
    text: *mut c_char,
    capacity: u64,
) -> i32 {
    guard::intact(v, |handle| {
        let last = handle.last_run.lock();
        let Some(FinishedRun { plan, seconds }) = &*last else {
            return Err(Error::State("no run has finished on this handle yet; encode or decode first".into()));
        };
        // SAFETY: the host vouches for a struct as long as it says.
        unsafe { sized::check("out", out) }?;
        // SAFETY: the host vouches for a buffer of this capacity.
        let text_length = unsafe { text::write(&plan.to_string(), text, capacity) };
        let report = vvae_run_report {
            struct_size: 0,
            exact: u32::from(plan.exact),
            node: node::of(plan.direction).id.as_ptr(),
            seconds: *seconds,
            estimated_seconds: plan.seconds,
            device_bytes: plan.device_bytes,
            host_bytes: plan.host_bytes,
            slice_frames: signed(plan.slice_frames),
            tile_rows: signed(plan.tiles.0),
            tile_columns: signed(plan.tiles.1),
            text_length,
        };
        // SAFETY: as above.
        unsafe { sized::write("out", out, report) }
    })
}

/// Tells the host a plan.
///
/// # Safety
/// `out` is as long as it says, and `text` null or a buffer of this capacity.
pub(super) unsafe fn write_plan(
    plan: &PlanReport,
    out: *mut vvae_plan_info,
    text: *mut c_char,
    capacity: u64,
) -> Result<i32> {
    // SAFETY: the caller's promise.
    let text_length = unsafe { text::write(&plan.to_string(), text, capacity) };
    // SAFETY: as above.
    unsafe { sized::write("out", out, report(plan, text_length)) }
}

/// Where the words of a plan go.
pub(super) struct Words {
    pub text: *mut c_char,
    pub capacity: u64,
}

/// Plans a clip, or the range of it that `range` gives for its number of frames.
///
/// # Safety
/// Everything is as the header asks of vvae_plan.
pub(super) unsafe fn plan_call(
    v: *const vvae,
    node: *const c_char,
    shape: *const i64,
    range: Option<&dyn Fn(u64) -> Result<ClipRange>>,
    out: *mut vvae_plan_info,
    words: Words,
) -> i32 {
    guard::exclusive(v, |handle, open| {
        // SAFETY: the caller's promise.
        let (direction, input) = unsafe { node_and_shape(node, shape, false) }?;
        // SAFETY: the caller's promise.
        unsafe { sized::check("out", out) }?;
        let extent = match range {
            Some(range) => Extent::Range(range(input.frames)?),
            None => clip_or_stream(input),
        };
        let plan = open.model.plan(&JobShape { direction, input, extent }, None, handle.cancel_flag())?;
        handle.planned(&plan);
        // SAFETY: the caller's promise.
        unsafe { write_plan(&plan, out, words.text, words.capacity) }
    })
}

/// Runs a clip, or the range of it that `range` gives for its number of output frames.
///
/// # Safety
/// Tensors and run info are as the header asks.
pub(super) unsafe fn run_call(
    v: *const vvae,
    direction: Direction,
    input: (&str, *const vvae_tensor),
    output: (&str, *const vvae_tensor),
    range: Option<&dyn Fn(u64) -> Result<ClipRange>>,
    run: *const vvae_run_info,
) -> i32 {
    guard::exclusive(v, |handle, open| {
        // SAFETY: the caller's promise.
        let (from, to) = unsafe { (tensor::view(input.0, input.1, false)?, tensor::view(output.0, output.1, true)?) };
        // SAFETY: as above.
        let run = unsafe { CallArgs::read(run) }?;
        let range = range.map(|range| range(to.shape().frames)).transpose()?;
        let call = Call { direction, range, input: from, into: run.outputs(to), first_clip: 0 };
        let started = Instant::now();
        let plan = run.with_control(handle, |control| open.model.run(&call, control))?;
        handle.finished(plan, started.elapsed().as_secs_f64());
        Ok(VVAE_OK)
    })
}

/// What is planned for an input: 0 frames stand for a stream.
fn clip_or_stream(input: Shape) -> Extent {
    if input.frames == 0 { Extent::Stream { first: 0 } } else { Extent::Clip }
}

/// The direction and input shape of a job. A stream has 0 frames, whatever the host passes.
///
/// # Safety
/// `node` is null or a NUL-terminated text, `shape` null or five numbers.
pub(super) unsafe fn node_and_shape(
    node: *const c_char,
    shape: *const i64,
    stream: bool,
) -> Result<(Direction, Shape)> {
    // SAFETY: the caller's promise.
    let node = unsafe { text::read("node", node) }?;
    let direction = node::find(node)?.direction;
    // SAFETY: the caller's promise.
    let Some(mut dims) = (unsafe { tensor::five(shape) }) else {
        return Err(Error::Argument("shape is null; it must point to 5 numbers".into()));
    };
    if stream {
        dims[2] = 0;
    }
    Ok((direction, tensor::shape("shape", dims)?))
}

/// A checked `vvae_run_info`.
pub(super) struct CallArgs {
    info: vvae_run_info,
    logvar: Option<View>,
}

impl CallArgs {
    /// # Safety
    /// `info` is null or as the header asks.
    pub unsafe fn read(info: *const vvae_run_info) -> Result<CallArgs> {
        let info = if info.is_null() {
            NOTHING
        } else {
            // SAFETY: the caller's promise.
            unsafe { sized::read("run", info) }?
        };
        if info.flags & !VVAE_RUN_HAS_STREAM != 0 {
            return Err(Error::Argument(format!(
                "run: flags {:#x} are not accepted; the only flag is VVAE_RUN_HAS_STREAM (1)",
                info.flags
            )));
        }
        if info.flags & VVAE_RUN_HAS_STREAM == 0 && !info.cuda_stream.is_null() {
            return Err(Error::Argument("run: cuda_stream is set, but not VVAE_RUN_HAS_STREAM in flags".into()));
        }
        let given = (!info.logvar.is_null()).then_some(info.logvar);
        // SAFETY: the caller's promise.
        let logvar = given.map(|logvar| unsafe { tensor::view("logvar", logvar, true) }).transpose()?;
        Ok(CallArgs { info, logvar })
    }

    /// Where a call or a pull writes, beside `output` and on the host's CUDA stream, if it gave one.
    pub fn outputs(&self, output: View) -> Outputs {
        let stream = (self.info.flags & VVAE_RUN_HAS_STREAM != 0).then_some(HostStream(self.info.cuda_stream));
        Outputs { output, logvar: self.logvar, stream }
    }

    /// Runs `body` with the host's progress callback, cancel and log.
    pub fn with_control<T>(&self, handle: &Handle, body: impl FnOnce(&mut Control) -> Result<T>) -> Result<T> {
        let vvae_run_info { progress, progress_user: user, .. } = self.info;
        let mut tell = progress.map(|callback| {
            move |p: Progress| {
                let stage = c_text(p.stage);
                // SAFETY: the host vouches for its callback and user pointer; the text lives until it returns.
                unsafe { callback(user, p.done, p.total, stage.as_ptr()) != 0 }
            }
        });
        let progress = tell.as_mut().map(|tell| tell as &mut dyn FnMut(Progress) -> bool);
        body(&mut Control { progress, ..handle.control() })
    }
}

const NOTHING: vvae_run_info = vvae_run_info {
    struct_size: 0,
    flags: 0,
    cuda_stream: std::ptr::null_mut(),
    progress: None,
    progress_user: std::ptr::null_mut(),
    logvar: std::ptr::null(),
};

/// Borrows known stages: progress is reported often.
fn c_text(stage: &'static str) -> Cow<'static, CStr> {
    match stage {
        "plan" => Cow::Borrowed(c"plan"),
        "load" => Cow::Borrowed(c"load"),
        "encode" => Cow::Borrowed(c"encode"),
        "decode" => Cow::Borrowed(c"decode"),
        other => Cow::Owned(CString::new(other).unwrap_or_default()),
    }
}

fn report(plan: &PlanReport, text_length: u64) -> vvae_plan_info {
    let mut chunk_frames = [0; 8];
    for (to, from) in chunk_frames.iter_mut().zip(&plan.chunk_frames) {
        *to = signed(*from);
    }
    vvae_plan_info {
        struct_size: 0,
        exact: u32::from(plan.exact),
        device_bytes: plan.device_bytes,
        host_bytes: plan.host_bytes,
        weight_bytes: plan.weight_bytes,
        workspace_bytes: plan.workspace_bytes,
        input_shape: plan.input.dims().map(signed),
        output_shape: plan.output.dims().map(signed),
        slice_frames: signed(plan.slice_frames),
        chunk_frames,
        chunk_count: plan.chunk_frames.len().min(chunk_frames.len()) as i64,
        tile_rows: signed(plan.tiles.0),
        tile_columns: signed(plan.tiles.1),
        tile_height: signed(plan.tile_size.0),
        tile_width: signed(plan.tile_size.1),
        tile_overlap: signed(plan.tile_overlap),
        text_length,
        offloaded_frame_bytes: plan.offloaded_bytes,
        moved_bytes_per_frame: plan.moved_per_frame,
        seconds: plan.seconds,
        offloaded_weight_bytes: plan.offloaded_weight_bytes,
    }
}
