//! Structs of any size in exactly as much memory, and tensors of any shape over exactly what they may touch, so that
//! the sanitizer sees every byte too many.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use super::{Bytes, timed};
use crate::common::{LATENT_CHANNELS, Vae, api, create_info, error_text, run_info, tiny};
use video_vae::capi::*;

/// No struct is longer.
const LONGEST: usize = 4096;

fn vae() -> &'static Vae {
    static VAE: OnceLock<Vae> = OnceLock::new();
    VAE.get_or_init(|| {
        let vae = Vae::open(tiny()).expect("the tiny checkpoint");
        vae.configure("threads", "1").expect("a number");
        vae
    })
}

/// Exactly the bytes that a struct says it has, if the library may touch them.
struct Memory(Box<[u8]>);

impl Memory {
    /// A struct that says `size`, filled with `value` and then with bytes of choice.
    fn new<T: Copy>(value: T, size: u32, bytes: &mut Bytes) -> Memory {
        let mut memory = vec![0u8; (size as usize).clamp(size_of::<u32>(), 2 * LONGEST)].into_boxed_slice();
        let known = memory.len().min(size_of::<T>());
        // SAFETY: within both.
        unsafe { (&raw const value).cast::<u8>().copy_to_nonoverlapping(memory.as_mut_ptr(), known) };
        if memory.len() > size_of::<T>() && bytes.one_in(4) {
            let at = size_of::<T>() + bytes.below((memory.len() - size_of::<T>()) as u64) as usize;
            memory[at] = bytes.byte();
        }
        memory[..4].copy_from_slice(&size.to_le_bytes());
        Memory(memory)
    }

    fn of<T: Copy>(value: T, bytes: &mut Bytes) -> Memory {
        let real = size_of::<T>() as u32;
        let size = match bytes.below(6) {
            0..=2 => real,
            3 => bytes.below(2 * u64::from(real)) as u32,
            4 => bytes.below(2 * LONGEST as u64) as u32,
            _ => bytes.number() as u32,
        };
        Memory::new(value, size, bytes)
    }

    fn at<T>(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}

fn settle(status: i32) {
    assert!((VVAE_ERROR_STATE..=VVAE_END).contains(&status), "status {status}: {}", error_text(null_mut()));
}

/// A struct that the library fills.
fn ask(bytes: &mut Bytes) {
    let api = api();
    let index = bytes.below(6) as u32;
    let mut text = vec![0 as c_char; bytes.below(300) as usize];
    let (at, room) = (text.as_mut_ptr(), text.len() as u64);
    let v = vae().0;
    macro_rules! with {
        ($type:ty, $call:expr) => {{
            let mut memory = Memory::of(crate::common::sized::<$type>(), bytes);
            let before = memory.0[..4].to_vec();
            // SAFETY: the memory is as long as it says, and the text has `room` bytes.
            settle(unsafe { $call(memory.at::<$type>()) });
            assert_eq!(memory.0[..4], before, "the size is the host's");
        }};
    }
    match bytes.below(9) {
        0 => with!(vvae_model_desc, |out| (api.vvae_model_info)(v, out)),
        1 => with!(vvae_memory_info, |out| (api.vvae_memory)(v, out)),
        2 => with!(vvae_handle_device_info, |out| (api.vvae_handle_device)(v, index, out)),
        3 => with!(vvae_device_desc, |out| (api.vvae_device_info)(0, out)),
        4 => with!(vvae_node_desc, |out| (api.vvae_node_info)(index, out)),
        5 => with!(vvae_port_desc, |out| (api.vvae_port_info)(index % 2, index, out)),
        6 => with!(vvae_param_desc, |out| (api.vvae_param_info)(index % 2, index, out)),
        7 => with!(vvae_run_report, |out| (api.vvae_last_run)(v, out, at, room)),
        _ => {
            let shape = [1, LATENT_CHANNELS, 2, 3, 3];
            with!(vvae_plan_info, |out| (api.vvae_plan)(v, c"decode".as_ptr(), shape.as_ptr(), out, at, room));
        }
    }
}

fn create(bytes: &mut Bytes) {
    let path = std::ffi::CString::new(tiny().to_str().expect("UTF-8")).expect("no NUL");
    let mut info = create_info(&path);
    if bytes.one_in(4) {
        info.abi_version = bytes.number() as u32;
    }
    let mut memory = Memory::of(info, bytes);
    let mut v = null_mut();
    // SAFETY: the memory is as long as it says.
    let status = unsafe { (api().vvae_create)(memory.at(), &mut v) };
    assert_eq!(status == VVAE_OK, !v.is_null());
    settle(status);
    // SAFETY: a handle or null.
    settle(unsafe { (api().vvae_free)(v) });
}

/// A tensor with memory for exactly its elements.
struct Tensor {
    raw: vvae_tensor,
    _shape: Box<[i64; 5]>,
    _strides: Option<Box<[i64; 5]>>,
    _memory: Vec<u8>,
}

const MOST_BYTES: i128 = 1 << 16;

impl Tensor {
    fn new(usual: [i64; 5], bytes: &mut Bytes) -> Tensor {
        let mut shape = usual;
        while bytes.one_in(6) {
            shape[bytes.below(5) as usize] = bytes.number().cast_signed();
        }
        let dtypes = [VVAE_DTYPE_F32, VVAE_DTYPE_F16, VVAE_DTYPE_BF16, VVAE_DTYPE_U8, VVAE_DTYPE_U16];
        let mut dtype = bytes.pick(&dtypes);
        let element = i128::from(dtype >> 8 & 0xff) / 8;
        if bytes.one_in(12) {
            dtype = bytes.number() as u32;
        }
        let product = |dims: &[i64]| dims.iter().fold(1i64, |p, d| p.wrapping_mul(*d));
        let [_, c, t, h, w] = shape;
        let compact = [product(&[c, t, h, w]), product(&[t, h, w]), product(&[h, w]), w, 1];
        let mut strides = match bytes.below(4) {
            0 | 1 => None,
            2 => Some([product(&[t, h, w, c]), 1, product(&[h, w, c]), product(&[w, c]), c]),
            _ => Some(compact),
        };
        if let Some(strides) = &mut strides {
            while bytes.one_in(4) {
                let stride = bytes.number().cast_signed();
                strides[bytes.below(5) as usize] = if bytes.one_in(2) { stride.wrapping_neg() } else { stride };
            }
        }
        let byte_offset = if bytes.one_in(8) { bytes.number() } else { 0 };
        // The lowest and the highest element, from `data` on.
        let (mut low, mut high) = (i128::from(byte_offset), i128::from(byte_offset));
        for (dim, stride) in shape.into_iter().zip(strides.unwrap_or(compact)) {
            let reach = i128::from(dim).saturating_sub(1).saturating_mul(i128::from(stride)).saturating_mul(element);
            if reach < 0 { low = low.saturating_add(reach) } else { high = high.saturating_add(reach) }
        }
        let fits = shape.iter().all(|dim| *dim > 0) && dtypes.contains(&dtype);
        let fits = fits && low > -MOST_BYTES && high.saturating_sub(low) < MOST_BYTES && byte_offset < 1 << 16;
        // What is refused needs no memory: a byte too far is then in nobody's memory.
        let (before, length) = match fits {
            true => ((-low).max(0) as usize, (high + element - low.min(0)) as usize),
            false => (0, 0),
        };
        // One more element, so that data may be aligned.
        let mut memory = vec![0u8; length];
        let data: *mut u8 = match fits {
            true => memory.as_mut_ptr().wrapping_add(before),
            // Too large for memory, or of a type that is none.
            false if shape.iter().any(|dim| *dim <= 0) || !dtypes.contains(&dtype) => memory.as_mut_ptr(),
            false => null_mut(),
        };
        let shape = Box::new(shape);
        let strides = strides.map(Box::new);
        let raw = vvae_tensor {
            data: data.cast::<c_void>(),
            device_type: if bytes.one_in(16) { bytes.number() as i32 } else { VVAE_DEVICE_CPU },
            device_id: 0,
            ndim: if bytes.one_in(16) { bytes.number() as i32 } else { 5 },
            dtype,
            shape: shape.as_ptr(),
            strides: strides.as_ref().map_or(null(), |strides| strides.as_ptr()),
            byte_offset,
        };
        Tensor { raw, _shape: shape, _strides: strides, _memory: memory }
    }
}

fn encode_or_decode(bytes: &mut Bytes) {
    let (frames, latents) = bytes.pick(&[(1, 1), (2, 2), (5, 2)]);
    let (video, latent) = ([1, 3, frames, 8, 8], [1, LATENT_CHANNELS, latents, 1, 1]);
    let encode = bytes.one_in(2);
    let [input, output] = if encode { [video, latent] } else { [latent, video] };
    let (input, output, logvar) = (Tensor::new(input, bytes), Tensor::new(output, bytes), Tensor::new(latent, bytes));
    let mut run = run_info();
    if bytes.one_in(4) {
        run.logvar = &logvar.raw;
    }
    if bytes.one_in(8) {
        run.flags = bytes.number() as u32;
    }
    let mut memory = Memory::of(run, bytes);
    let run = if bytes.one_in(2) { memory.at() } else { null_mut() };
    let function = if encode { api().vvae_encode } else { api().vvae_decode };
    // SAFETY: tensors that the library accepts have memory for every element; the struct is as long as it says.
    settle(unsafe { function(vae().0, &input.raw, &output.raw, run) });
}

pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    timed("a call", || match bytes.below(8) {
        0..=3 => ask(&mut bytes),
        4 => create(&mut bytes),
        _ => encode_or_decode(&mut bytes),
    });
}
