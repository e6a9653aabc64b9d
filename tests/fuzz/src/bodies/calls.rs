//! Sequences of calls with bad arguments. Each call gives an error or a result, nothing else. Pointers are valid.
//! All else is chosen by the bytes: shapes, strides, types, devices, handles, keys, values, struct sizes.

use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut, without_provenance_mut};

use super::{Bytes, timed};
use crate::common::{self, LATENT_CHANNELS, Vae, api, error_text, tiny};
use video_vae::capi::*;

/// Words of eight bytes: twice the longest struct that the library accepts.
const STRUCT_WORDS: usize = 1024;

/// Memory for tensors. Every tensor that passes the library's checks is inside it.
struct Arena(Vec<u64>);

impl Arena {
    fn new() -> Arena {
        Arena(vec![0; 1 << 13])
    }

    fn middle(&self) -> *mut c_void {
        self.0[self.0.len() / 2..].as_ptr().cast_mut().cast()
    }

    /// Whether every element is inside, with data at the middle.
    fn holds(&self, shape: [i64; 5], strides: Option<[i64; 5]>, element: i128, offset: u64) -> bool {
        let mut compact = [1i128; 5];
        for axis in (0..4).rev() {
            compact[axis] = compact[axis + 1].saturating_mul(i128::from(shape[axis + 1]));
        }
        let strides = strides.map_or(compact, |s| s.map(i128::from));
        let reach = shape.iter().zip(strides).fold(0i128, |sum, (dim, stride)| {
            sum.saturating_add(stride.saturating_abs().saturating_mul(i128::from(*dim).max(1) - 1))
        });
        reach.saturating_add(1).saturating_mul(element).saturating_add(i128::from(offset)) <= self.0.len() as i128 * 4
    }
}

/// A tensor and its arrays.
struct Tensor {
    raw: vvae_tensor,
    _arrays: Box<([i64; 5], [i64; 5])>,
}

fn tensor(random: &mut Bytes, arena: &Arena, usual: [i64; 5]) -> Tensor {
    // Most calls have two tensors. Some must pass the checks of both.
    let wild = random.one_in(3);
    let mut shape = usual;
    while wild && random.one_in(3) {
        shape[random.below(5) as usize] =
            random.pick(&[-1, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 1 << 20, 1 << 40, i64::MAX, i64::MIN]);
    }
    let [_, c, t, h, w] = shape.map(|d| i128::from(d) as i64);
    let product = |dims: &[i64]| dims.iter().fold(1i64, |p, d| p.wrapping_mul(*d));
    let interleaved = [product(&[t, h, w, c]), 1, product(&[h, w, c]), product(&[w, c]), c];
    let mut strides = match random.below(4) {
        0 | 1 => None,
        2 => Some(interleaved),
        _ => Some([product(&[c, t, h, w]), product(&[t, h, w]), product(&[h, w]), w, 1]),
    };
    if let Some(strides) = &mut strides
        && wild
        && random.one_in(3)
    {
        strides[random.below(5) as usize] = random.pick(&[0, 1, -1, 2, -16, 1000, i64::MAX, i64::MIN]);
    }
    let f32 = VVAE_DTYPE_F32;
    let dtype = if wild {
        random.pick(&[f32, f32, f32, VVAE_DTYPE_F16, VVAE_DTYPE_BF16, VVAE_DTYPE_U8, VVAE_DTYPE_U16, 0, 0x14002])
    } else {
        f32
    };
    let byte_offset = if wild { random.pick(&[0, 0, 0, 0, 4, 64, 3, u64::MAX]) } else { 0 };
    let mut arrays = Box::new((shape, strides.unwrap_or_default()));
    let mut raw = vvae_tensor {
        data: arena.middle(),
        device_type: if wild { random.pick(&[1, 1, 1, 1, 1, 1, 1, 3, 2, 0, -7]) } else { 1 },
        device_id: random.pick(&[0, 0, 0, 1, -1]),
        ndim: if wild { random.pick(&[5, 5, 5, 5, 5, 5, 5, 4, 0, -1, i32::MAX]) } else { 5 },
        dtype,
        shape: null(),
        strides: null(),
        byte_offset,
    };
    if !arena.holds(shape, strides, 4, byte_offset.min(1 << 40)) {
        // The library might accept it, so give it a fault that every call refuses.
        match random.below(4) {
            0 => raw.data = null_mut(),
            1 => raw.ndim = 4,
            2 => raw.dtype = 0x0001_4002,
            _ => arrays.0[1] = 7,
        }
    }
    raw.shape = if random.one_in(30) { null() } else { arrays.0.as_ptr() };
    raw.strides = if strides.is_some() { arrays.1.as_ptr() } else { null() };
    Tensor { raw, _arrays: arrays }
}

/// A struct with a random `struct_size`, in more memory than it needs.
fn with_random_size<T: Copy>(random: &mut Bytes, value: T) -> Box<[u64; STRUCT_WORDS]> {
    let mut memory = Box::new([0u64; STRUCT_WORDS]);
    let size = size_of::<T>() as u32;
    // SAFETY: structs fit in the memory, and begin with their size.
    unsafe {
        memory.as_mut_ptr().cast::<T>().write_unaligned(value);
        let said =
            random.pick(&[size, size, size, size, size, size, size + 8, size - 8, 0, 1, 8, 13, 4096, 4097, u32::MAX]);
        memory.as_mut_ptr().cast::<u32>().write(said);
    }
    if random.one_in(20) {
        memory[size as usize / 8 + 1 + random.below(4) as usize] = random.next();
    }
    memory
}

/// Stops the run when the count is 0.
unsafe extern "C" fn count_down(user: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    // SAFETY: the sequence passes a count that outlives the run.
    let left = unsafe { &mut *user.cast::<u64>() };
    *left = left.saturating_sub(1);
    i32::from(*left == 0)
}

pub struct World {
    random: Bytes,
    handles: Vec<*mut vvae>,
    streams: Vec<*mut vvae_stream>,
    input: Arena,
    output: Arena,
    logvar: Arena,
    countdown: Box<u64>,
    pub results: u64,
    pub failures: u64,
}

pub const VIDEOS: [[i64; 5]; 5] =
    [[1, 3, 1, 8, 8], [1, 3, 5, 8, 16], [2, 3, 2, 16, 8], [1, 3, 9, 8, 8], [1, 3, 1, 9, 13]];

/// The latent shape of a video.
fn latent_of([b, _, t, h, w]: [i64; 5]) -> [i64; 5] {
    [b, LATENT_CHANNELS, (t + 2) / 4 + 1, (h + 7) / 8, (w + 7) / 8]
}

impl World {
    /// `first` stays open.
    pub fn new(first: &Vae) -> World {
        World {
            random: Bytes::new(&[]),
            handles: vec![first.0],
            streams: Vec::new(),
            input: Arena::new(),
            output: Arena::new(),
            logvar: Arena::new(),
            countdown: Box::new(0),
            results: 0,
            failures: 0,
        }
    }

    /// A sequence of up to `most` calls.
    pub fn sequence(&mut self, data: &[u8], most: usize) {
        self.random = Bytes::new(data);
        if self.random.one_in(50) {
            self.create();
        }
        for _ in 0..most {
            if self.random.is_empty() {
                break;
            }
            let call = self.random.below(17);
            timed("a call", || match call {
                0 if self.random.one_in(10) => self.free(),
                0..=2 => self.configure(),
                3..=6 => self.run(),
                7 | 8 => self.plan(),
                9 => self.stream_open(),
                10 | 11 => self.stream_push(),
                12 | 13 => self.stream_pull(),
                14 => self.stream_close(),
                15 => self.range_inputs(),
                _ => self.ask(),
            });
        }
    }

    /// Frees every handle but the first.
    pub fn end(mut self) {
        for v in self.handles.split_off(1) {
            // SAFETY: any number may be passed.
            unsafe { (api().vvae_free)(v) };
        }
    }

    /// Mostly an open handle.
    fn handle(&mut self) -> *mut vvae {
        match self.random.below(12) {
            0 => null_mut(),
            1 => without_provenance_mut(self.random.next() as usize),
            // Freed, not yet created, or a stream.
            2 => without_provenance_mut((self.random.below(4000) << 4) as usize),
            _ => self.random.pick(&self.handles),
        }
    }

    fn stream(&mut self) -> *mut vvae_stream {
        match self.random.below(12) {
            0 => null_mut(),
            1 => without_provenance_mut(self.random.next() as usize),
            _ if self.streams.is_empty() => null_mut(),
            _ => self.random.pick(&self.streams),
        }
    }

    fn settle(&mut self, status: i32) {
        assert!((VVAE_ERROR_STATE..=VVAE_END).contains(&status), "status {status}: {}", error_text(null_mut()));
        if status < 0 {
            assert!(!error_text(null_mut()).is_empty());
            self.failures += 1;
        } else {
            self.results += 1;
        }
    }

    fn create(&mut self) {
        let good = tiny().to_str().unwrap().to_owned();
        let clip = common::golden("small-clip5.safetensors").to_str().unwrap().to_owned();
        let path = match self.random.below(8) {
            0 => CString::new("").unwrap(),
            1 => CString::new(clip).unwrap(),
            2 => CString::new("/").unwrap(),
            3 => CString::new(b"\xff\xc0".to_vec()).unwrap(),
            _ => CString::new(good).unwrap(),
        };
        let mut info = common::create_info(&path);
        info.device = self.random.pick(&[c"cpu", c"auto", c"cpu", c"cuda:9", c"", c"cpu,cpu"]).as_ptr();
        if self.random.one_in(10) {
            info.abi_version = self.random.next() as u32;
        }
        let info = with_random_size(&mut self.random, info);
        let mut v = null_mut();
        // SAFETY: the memory is longer than any size that the library accepts.
        let status = unsafe { (api().vvae_create)(info.as_ptr().cast(), &mut v) };
        assert_eq!(status == VVAE_OK, !v.is_null());
        self.settle(status);
        if status == VVAE_OK {
            self.handles.push(v);
        }
    }

    fn free(&mut self) {
        let v = self.handle();
        // Keep one handle.
        if v == self.handles[0] {
            return;
        }
        // SAFETY: any number may be passed.
        let status = unsafe { (api().vvae_free)(v) };
        self.settle(status);
        if self.random.one_in(2) {
            self.handles.retain(|open| *open != v);
        }
    }

    fn configure(&mut self) {
        const SETTINGS: &[(&str, &[&str])] = &[
            ("memory_limit", &["auto", "64MiB", "1", "4GB", "0", "-1", "1e9"]),
            ("threads", &["1", "2", "auto", "0", "many", "1025"]),
            ("instruction_set", &["auto", "portable", "avx2", "sse", ""]),
            ("precision", &["auto", "fp32", "fp16", "half"]),
            ("pixel_range", &["-1..1", "0..1", "0..2"]),
            ("scaling_factor", &["1.0", "0.9152", "nan", "0", "1e99"]),
            ("posterior", &["mean", "sample", "median"]),
            ("seed", &["1", "18446744073709551615", "-1", "18446744073709551616"]),
            ("encode_tiled", &["false", "true", "2"]),
            ("decode_tiled", &["false", "1", "yes"]),
            ("encode_tile_size", &["64", "1024", "63", "x"]),
            ("decode_tile_overlap", &["0", "128", "64", "-8"]),
            ("slice_frames", &["auto", "1", "3", "5000"]),
            ("chunk_frames", &["auto", "1", "2", "\u{661}"]),
            ("no_such_key", &["1", ""]),
            ("", &[""]),
        ];
        let v = self.handle();
        let (key, values) = self.random.pick(SETTINGS);
        // The first value of each is harmless, and undoes the others.
        let value = if self.random.one_in(2) { values[0] } else { self.random.pick(values) };
        let [key, value] = [key, value].map(|text| CString::new(text).unwrap());
        let key = if self.random.one_in(20) { null() } else { key.as_ptr() };
        let value = if self.random.one_in(20) { null() } else { value.as_ptr() };
        // SAFETY: C strings or null.
        let status = unsafe { (api().vvae_configure)(v, key, value) };
        self.settle(status);
    }

    /// A random run info, and the log-variance that it may point to.
    fn run_info(&mut self, latent: [i64; 5]) -> (Box<[u64; STRUCT_WORDS]>, Tensor) {
        let logvar = tensor(&mut self.random, &self.logvar, latent);
        *self.countdown = self.random.below(40);
        let mut run = common::run_info();
        run.flags = self.random.pick(&[0, 0, 0, 0, 1, 2, u32::MAX]);
        run.cuda_stream = without_provenance_mut(self.random.pick(&[0, 0, 0, 8]));
        if self.random.one_in(3) {
            run.progress = Some(count_down);
            run.progress_user = (&raw mut *self.countdown).cast();
        }
        (with_random_size(&mut self.random, run), logvar)
    }

    fn run(&mut self) {
        let v = self.handle();
        let video = self.random.pick(&VIDEOS);
        let encode = self.random.one_in(2);
        let ends = if encode { [video, latent_of(video)] } else { [latent_of(video), video] };
        let input = tensor(&mut self.random, &self.input, ends[0]);
        let output = tensor(&mut self.random, &self.output, ends[1]);
        let (mut run, logvar) = self.run_info(latent_of(video));
        if self.random.one_in(4) {
            // SAFETY: the memory holds a run info.
            unsafe { (*run.as_mut_ptr().cast::<vvae_run_info>()).logvar = &logvar.raw };
        }
        let run = if self.random.one_in(2) { null() } else { run.as_ptr().cast() };
        let input: *const vvae_tensor = if self.random.one_in(40) { null() } else { &input.raw };
        let output: *const vvae_tensor = if self.random.one_in(40) { null() } else { &output.raw };
        if self.random.one_in(4) {
            let (clip, first) = (self.frame_number(ends[0][2]), self.frame_number(0));
            let function = if encode { api().vvae_encode_range } else { api().vvae_decode_range };
            // SAFETY: as below.
            let status = unsafe { function(v, input, clip, first, output, run) };
            return self.settle(status);
        }
        let function = if encode { api().vvae_encode } else { api().vvae_decode };
        // SAFETY: tensors that pass the checks are inside their arenas; the struct has enough memory.
        let status = unsafe { function(v, input, output, run) };
        self.settle(status);
    }

    fn node_and_shape(&mut self) -> (*const c_char, [i64; 5]) {
        let node = self.random.pick(&[c"encode", c"decode", c"encode", c"decode", c"", c"node"]);
        let mut shape = self.random.pick(&VIDEOS);
        if node == c"decode" {
            shape = latent_of(shape);
        }
        while self.random.one_in(4) {
            shape[self.random.below(5) as usize] =
                self.random.pick(&[-1, 0, 1, 3, 16, 200, 720, 1 << 17, 1 << 40, i64::MAX]);
        }
        (if self.random.one_in(30) { null() } else { node.as_ptr() }, shape)
    }

    /// Mostly `usual`.
    fn frame_number(&mut self, usual: i64) -> i64 {
        if self.random.one_in(2) { usual } else { self.random.pick(&[-1, 0, 1, 2, 5, 1 << 33, i64::MAX, i64::MIN]) }
    }

    fn range_inputs(&mut self) {
        let (v, (node, shape)) = (self.handle(), self.node_and_shape());
        let (first, count) = (self.frame_number(1), self.frame_number(1));
        let (mut from, mut frames) = (0, 0);
        let from: *mut i64 = if self.random.one_in(30) { null_mut() } else { &mut from };
        // SAFETY: pointers are null or valid.
        let status = unsafe { (api().vvae_range_inputs)(v, node, shape[2], first, count, from, &mut frames) };
        self.settle(status);
    }

    fn plan(&mut self) {
        let v = self.handle();
        let (node, shape) = self.node_and_shape();
        let mut out = with_random_size(&mut self.random, common::sized::<vvae_plan_info>());
        let mut text = [0 as c_char; 64];
        let capacity = self.random.below(65);
        let shape = if self.random.one_in(30) { null() } else { shape.as_ptr() };
        let (out, text) = (out.as_mut_ptr().cast(), text.as_mut_ptr());
        if self.random.one_in(3) {
            let (first, count) = (self.frame_number(0), self.frame_number(1));
            // SAFETY: as below.
            let status = unsafe { (api().vvae_plan_range)(v, node, shape, first, count, out, text, capacity) };
            return self.settle(status);
        }
        if self.random.one_in(4) {
            let mut length = 0;
            // SAFETY: as below.
            let status = unsafe { (api().vvae_plan_timeline)(v, node, shape, text, capacity, &mut length) };
            return self.settle(status);
        }
        // SAFETY: pointers are null or valid; nothing beyond the struct is written.
        let status = unsafe { (api().vvae_plan)(v, node, shape, out, text, capacity) };
        self.settle(status);
    }

    fn stream_open(&mut self) {
        let v = self.handle();
        let (node, shape) = self.node_and_shape();
        // A stream's memory grows with its frames, so keep them small.
        if shape[0] > 16 || shape[3] > 720 || shape[4] > 720 || shape[3].saturating_mul(shape[4]) > 4096 {
            return;
        }
        let mut s = null_mut();
        let first = if self.random.one_in(2) { 0 } else { self.frame_number(1) };
        // SAFETY: pointers are null or valid.
        let status = unsafe { (api().vvae_stream_open_at)(v, node, shape.as_ptr(), first, &mut s) };
        self.settle(status);
        if status == VVAE_OK {
            self.streams.push(s);
        }
    }

    fn stream_push(&mut self) {
        let s = self.stream();
        let video = self.random.pick(&VIDEOS);
        let shape = self.random.pick(&[video, latent_of(video)]);
        let frames = tensor(&mut self.random, &self.input, shape);
        let mut taken = 0;
        let frames: *const vvae_tensor = if self.random.one_in(6) { null() } else { &frames.raw };
        let count: *mut i64 = if self.random.one_in(20) { null_mut() } else { &mut taken };
        // SAFETY: pointers are null or valid.
        let status = unsafe { (api().vvae_stream_push)(s, frames, count) };
        self.settle(status);
    }

    fn stream_pull(&mut self) {
        let s = self.stream();
        let video = self.random.pick(&VIDEOS);
        let shape = self.random.pick(&[video, latent_of(video)]);
        let out = tensor(&mut self.random, &self.output, shape);
        let (run, _logvar) = self.run_info(latent_of(video));
        let run = if self.random.one_in(2) { null() } else { run.as_ptr().cast() };
        let mut written = 0;
        // SAFETY: pointers are null or valid.
        let status = unsafe { (api().vvae_stream_pull)(s, &out.raw, run, &mut written) };
        self.settle(status);
    }

    fn stream_close(&mut self) {
        let s = self.stream();
        // SAFETY: any number may be passed.
        let status = unsafe { (api().vvae_stream_close)(s) };
        self.settle(status);
        // Closed streams stay in the list for a while, to be used again.
        if self.streams.len() > 6 {
            self.streams.remove(0);
        }
    }

    fn ask(&mut self) {
        let v = self.handle();
        let numbers = [(); 3].map(|()| self.random.pick(&[0, 1, 2, 3, 9, u32::MAX]));
        let mut out = with_random_size(&mut self.random, common::sized::<vvae_param_desc>());
        let mut text = [0 as c_char; 32];
        let capacity = self.random.below(33);
        // SAFETY: numbers, any handle, and memory longer than any struct.
        let status = unsafe {
            let api = api();
            (api.vvae_choice)(numbers[0], numbers[1], numbers[2]);
            (api.vvae_choice_count)(numbers[0], numbers[1]);
            assert!((api.vvae_error)(v, text.as_mut_ptr(), capacity) >= 0);
            match self.random.below(9) {
                0 => (api.vvae_memory)(v, out.as_mut_ptr().cast()),
                1 => (api.vvae_model_info)(v, out.as_mut_ptr().cast()),
                2 => (api.vvae_trim)(v, numbers[0]),
                3 => (api.vvae_cancel)(v),
                4 => (api.vvae_node_info)(numbers[0], out.as_mut_ptr().cast()),
                5 => (api.vvae_port_info)(numbers[0], numbers[1], out.as_mut_ptr().cast()),
                7 => (api.vvae_handle_device)(v, numbers[0], out.as_mut_ptr().cast()),
                6 => (api.vvae_param_info)(numbers[0], numbers[1], out.as_mut_ptr().cast()),
                _ => (api.vvae_device_info)(numbers[0], null_mut()),
            }
        };
        self.settle(status);
    }
}

pub fn run(data: &[u8]) {
    let first = Vae::open(tiny()).expect("the tiny checkpoint");
    let mut world = World::new(&first);
    world.sequence(data, 24);
    world.end();
    assert_eq!(first.free(), VVAE_OK);
}
