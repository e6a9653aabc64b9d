//! How fast this GPU multiplies large matrices, by NVIDIA's own library where the machine has one: the rate that a
//! convolution can be compared with.

use std::ffi::c_void;
use std::ptr::null_mut;

use half::f16;
use libloading::Library;

use crate::Result;
use crate::gpu::Gpu;
use crate::random_weights::Random;

const SIZE: usize = 8192;
/// Products of one burst, and bursts, of which the median counts: as long as a convolution of a large frame, so that
/// the card's clock is that of such work.
const BURST: u32 = 20;
const BURSTS: usize = 5;

type Create = unsafe extern "C" fn(*mut *mut c_void) -> i32;
type Destroy = unsafe extern "C" fn(*mut c_void) -> i32;
type GemmEx = unsafe extern "C" fn(
    *mut c_void,
    i32,
    i32,
    i32,
    i32,
    i32,
    *const f32,
    u64,
    i32,
    i32,
    u64,
    i32,
    i32,
    *const f32,
    u64,
    i32,
    i32,
    i32,
    i32,
) -> i32;

const NO_TRANSPOSITION: i32 = 0;
/// CUDA_R_16F
const HALF: i32 = 2;
/// CUBLAS_COMPUTE_32F
const SUMS_IN_SINGLE: i32 = 68;
/// CUBLAS_GEMM_DEFAULT
const ANY_ALGORITHM: i32 = -1;

/// Multiplications and additions a second of a product of 8192 x 8192 matrices in f16 with f32 sums.
pub fn rate(index: i32) -> Result<f64> {
    let library = open()?;
    let gpu = Gpu::open(index)?;
    let cublas = Cublas::new(&library)?;
    let bytes = random_halves();
    let matrices = [gpu.memory(bytes.len())?, gpu.memory(bytes.len())?, gpu.memory(bytes.len())?];
    matrices.iter().try_for_each(|matrix| matrix.write(&bytes))?;
    let [a, b, c] = [0, 1, 2].map(|i| matrices[i].address);
    let burst = || (0..BURST).try_for_each(|_| cublas.multiply(a, b, c));
    gpu.time(burst)?;
    let mut times = (0..BURSTS).map(|_| gpu.time(burst)).collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(2.0 * (SIZE as f64).powi(3) * f64::from(BURST) / times[BURSTS / 2])
}

/// The newest there is, where the system looks for libraries and where the toolkit puts it.
fn open() -> Result<Library> {
    let names = match cfg!(windows) {
        true => vec!["cublas64_13.dll", "cublas64_12.dll"],
        false => vec!["libcublas.so.13", "libcublas.so.12"],
    };
    let places = names.iter().map(|name| (*name).to_owned());
    let toolkit = names.iter().map(|name| format!("/usr/local/cuda/lib64/{name}"));
    let named = std::env::var("VVAE_CUBLAS").ok();
    // SAFETY: cuBLAS, or what the user says is it; it does nothing when it is opened.
    let mut tried = named.into_iter().chain(places).chain(toolkit).map(|place| unsafe { Library::new(place) });
    let why = || format!("there is no cuBLAS here ({}); VVAE_CUBLAS may name it", names.join(" or "));
    tried.find_map(std::result::Result::ok).ok_or_else(why)
}

/// As unlike each other as weights and activations are: a card that is limited by its power is faster on zeros.
fn random_halves() -> Vec<u8> {
    let mut random = Random(5);
    let some: Vec<u8> = (0..1 << 20).flat_map(|_| f16::from_f32(random.normal()).to_le_bytes()).collect();
    some.iter().copied().cycle().take(SIZE * SIZE * 2).collect()
}

struct Cublas {
    handle: *mut c_void,
    destroy: Destroy,
    multiply: GemmEx,
}

impl Cublas {
    fn new(library: &Library) -> Result<Cublas> {
        let missing = |why: libloading::Error| format!("cuBLAS lacks a function: {why}");
        // SAFETY: the signatures are those of its header.
        let (create, destroy, multiply) = unsafe {
            (
                *library.get::<Create>("cublasCreate_v2\0").map_err(missing)?,
                *library.get::<Destroy>("cublasDestroy_v2\0").map_err(missing)?,
                *library.get::<GemmEx>("cublasGemmEx\0").map_err(missing)?,
            )
        };
        let mut handle = null_mut();
        // SAFETY: a context is current.
        match unsafe { create(&mut handle) } {
            0 => Ok(Cublas { handle, destroy, multiply }),
            status => Err(format!("cuBLAS does not start: status {status}")),
        }
    }

    /// c = a b, on stream 0.
    fn multiply(&self, a: u64, b: u64, c: u64) -> Result<()> {
        let (n, one, zero) = (SIZE as i32, 1.0f32, 0.0f32);
        // SAFETY: three square matrices of this size on the device; the factors are read during the call.
        let status = unsafe {
            (self.multiply)(
                self.handle,
                NO_TRANSPOSITION,
                NO_TRANSPOSITION,
                n,
                n,
                n,
                &one,
                a,
                HALF,
                n,
                b,
                HALF,
                n,
                &zero,
                c,
                HALF,
                n,
                SUMS_IN_SINGLE,
                ANY_ALGORITHM,
            )
        };
        if status == 0 { Ok(()) } else { Err(format!("cuBLAS does not multiply: status {status}")) }
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        unsafe { (self.destroy)(self.handle) };
    }
}
