//! The library's memory figures match the driver's, and all memory is freed.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_void};
use std::time::Duration;

use crate::common::{Buffer, Vae, create_info, run_info, small};
use crate::driver::{Gpu, Memory, Stream};
use crate::{latent, on_device, open, video};
use video_vae::capi::*;

/// The driver allocates in pieces of this size. Small blocks share one.
const PIECE: i64 = 2 << 20;

fn decode_once() {
    let vae = open(&small());
    let latent = latent(2, 3, 4);
    vae.decode(&latent, &mut video(&latent, VVAE_DTYPE_F32)).unwrap();
}

#[test]
fn repeated_runs_leak_no_device_memory() {
    let Some(gpu) = Gpu::open() else { return };
    // The first rounds allocate what the context keeps.
    (0..3).for_each(|_| decode_once());
    let before = gpu.free_bytes();
    (0..200).for_each(|_| decode_once());
    let after = gpu.free_bytes();
    println!("free before: {before}, after 200 rounds: {after}");
    assert!((before - after).abs() <= PIECE, "{} bytes are missing", before - after);
}

#[test]
fn trim_frees_what_the_figures_say() {
    let Some(gpu) = Gpu::open() else { return };
    decode_once();
    let vae = open(&small());
    let latent = latent(2, 64, 80);
    let mut out = video(&latent, VVAE_DTYPE_U8);
    // Once before the baseline, so that kernels and the context's memory for them are loaded.
    vae.decode(&latent, &mut out).unwrap();
    vae.trim(VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS).unwrap();
    assert_eq!(vae.memory().now, 0);
    let empty = gpu.free_bytes();

    vae.decode(&latent, &mut out).unwrap();
    let plan = vae.plan("decode", latent.shape).unwrap().0;
    let (held, taken) = (vae.memory().now as i64, empty - gpu.free_bytes());
    let weights = plan.weight_bytes as i64;
    println!("held {held}, of it weights {weights}; the driver gave {taken}");
    // Weights are many small blocks, which do not fill their pieces.
    assert!(taken >= held - 4 * PIECE && taken <= held + weights / 2 + 8 * PIECE, "held {held}, given {taken}");

    vae.trim(VVAE_TRIM_WORKSPACE).unwrap();
    let freed = gpu.free_bytes() - (empty - taken);
    let workspace = held - vae.memory().now as i64;
    assert!((freed - workspace).abs() <= 4 * PIECE, "workspace {workspace}, freed {freed}");

    vae.trim(VVAE_TRIM_WEIGHTS).unwrap();
    let missing = empty - gpu.free_bytes();
    assert!(missing.abs() <= PIECE, "{missing} bytes are missing");
}

#[test]
fn handles_share_weights_on_the_device() {
    let Some(gpu) = Gpu::open() else { return };
    let latent = latent(1, 4, 4);
    let one = open(&small());
    one.decode(&latent, &mut video(&latent, VVAE_DTYPE_F32)).unwrap();
    let (plan, before) = (one.plan("decode", latent.shape).unwrap().0, gpu.free_bytes());
    let two = open(&small());
    two.decode(&latent, &mut video(&latent, VVAE_DTYPE_F32)).unwrap();
    let taken = before - gpu.free_bytes();
    let most = plan.workspace_bytes as i64 + 4 * PIECE;
    assert!(taken <= most && most < plan.weight_bytes as i64 + PIECE, "{taken} bytes for the second handle");
}

/// A host's allocator of device memory. Freed blocks are overwritten at once, on a stream that waits for nothing.
struct Pool<'a> {
    gpu: &'a Gpu,
    eraser: Stream<'a>,
    blocks: RefCell<Vec<Memory<'a>>>,
    peak: Cell<u64>,
    /// Larger blocks are refused.
    largest: Cell<u64>,
}

impl<'a> Pool<'a> {
    fn new(gpu: &'a Gpu) -> Pool<'a> {
        let (peak, largest) = (Cell::new(0), Cell::new(u64::MAX));
        Pool { gpu, eraser: gpu.stream(), blocks: RefCell::default(), peak, largest }
    }

    fn given(&self) -> u64 {
        self.blocks.borrow().iter().map(|block| block.bytes as u64).sum()
    }

    fn open(&self) -> Vae {
        let weights = CString::new(small().to_str().unwrap()).unwrap();
        let info = vvae_create_info {
            device: c"cuda:0".as_ptr(),
            device_alloc: Some(take),
            device_free: Some(give),
            device_alloc_user: std::ptr::from_ref(self).cast_mut().cast(),
            ..create_info(&weights)
        };
        Vae::create(&info).unwrap_or_else(|why| panic!("{}", why.text))
    }
}

unsafe extern "C" fn take(user: *mut c_void, device: i32, bytes: u64) -> *mut c_void {
    // SAFETY: every test passes a pool that outlives its handles.
    let pool = unsafe { &*user.cast::<Pool>() };
    assert!(device == 0 && bytes > 0 && pool.gpu.current() == pool.gpu.primary());
    if bytes > pool.largest.get() {
        return std::ptr::null_mut();
    }
    let block = pool.gpu.memory(bytes as usize);
    let address = block.address as usize;
    pool.blocks.borrow_mut().push(block);
    pool.peak.set(pool.peak.get().max(pool.given()));
    std::ptr::without_provenance_mut(address)
}

unsafe extern "C" fn give(user: *mut c_void, device: i32, block: *mut c_void, bytes: u64) {
    // SAFETY: as in `take`.
    let pool = unsafe { &*user.cast::<Pool>() };
    let mut blocks = pool.blocks.borrow_mut();
    let at = blocks.iter().position(|known| known.address == block.addr() as u64).expect("a block of this pool");
    let block = blocks.remove(at);
    assert_eq!((device, bytes), (0, block.bytes as u64));
    pool.eraser.fill(&block, 0xff);
    pool.eraser.wait();
}

#[test]
fn host_allocator_serves_every_planned_byte() {
    let Some(gpu) = Gpu::open() else { return };
    let latent = latent(2, 64, 80);
    let (mut expected, mut out) = (video(&latent, VVAE_DTYPE_F32), video(&latent, VVAE_DTYPE_F32));
    open(&small()).decode(&latent, &mut expected).unwrap();
    let pool = Pool::new(&gpu);
    let vae = pool.open();
    vae.decode(&latent, &mut out).unwrap();
    assert!(out.bytes() == expected.bytes());
    let plan = vae.plan("decode", latent.shape).unwrap().0;
    assert_eq!(plan.offloaded_frame_bytes, 0, "no pinned memory, which takes page tables on the device");
    assert_eq!((pool.given(), pool.peak.get()), (plan.device_bytes, plan.device_bytes));
    assert_eq!(pool.given(), vae.memory().now);

    let other = pool.open();
    other.decode(&latent, &mut out).unwrap();
    assert_eq!(pool.given(), plan.device_bytes + plan.workspace_bytes, "handles with the same allocator share weights");
    vae.trim(VVAE_TRIM_WORKSPACE).unwrap();
    assert_eq!(pool.given(), plan.device_bytes);
    assert_eq!(other.free(), VVAE_OK);
    assert_eq!(pool.given(), plan.weight_bytes);
    vae.decode(&latent, &mut out).unwrap();
    assert!(out.bytes() == expected.bytes());
    assert_eq!(vae.free(), VVAE_OK);
    assert_eq!(pool.given(), 0);
}

#[test]
fn job_is_replanned_with_the_same_bits_when_the_host_allocator_refuses() {
    let Some(gpu) = Gpu::open() else { return };
    let latent = latent(6, 90, 120);
    let (mut expected, mut out) = (video(&latent, VVAE_DTYPE_F16), video(&latent, VVAE_DTYPE_F16));
    open(&small()).decode(&latent, &mut expected).unwrap();
    let pool = Pool::new(&gpu);
    let vae = pool.open();
    let whole = vae.plan("decode", latent.shape).unwrap().0.workspace_bytes;
    pool.largest.set(whole * 6 / 10);
    vae.decode(&latent, &mut out).unwrap();
    assert!(out.bytes() == expected.bytes());
    vae.trim(VVAE_TRIM_WORKSPACE | VVAE_TRIM_WEIGHTS).unwrap();
    assert_eq!(pool.given(), 0);

    pool.largest.set(1 << 20);
    let refused = vae.decode(&latent, &mut out).unwrap_err();
    refused.says(VVAE_ERROR_MEMORY, &["memory_limit", "smallest plan"]);
    assert_eq!(pool.given(), 0);
    pool.largest.set(u64::MAX);
    vae.decode(&latent, &mut out).unwrap();
    assert!(out.bytes() == expected.bytes());
}

#[test]
fn host_allocator_gets_memory_back_after_its_work() {
    let Some(gpu) = Gpu::open() else { return };
    let latent = latent(5, 9, 7);
    let mut expected = video(&latent, VVAE_DTYPE_F32);
    open(&small()).decode(&latent, &mut expected).unwrap();
    let poisoned = |like: &Buffer| gpu.copy_of(&vec![0xff; like.bytes().len()]);
    let (from, to) = (gpu.copy_of(latent.bytes()), poisoned(&expected));
    let (pool, stream) = (Pool::new(&gpu), gpu.stream());
    let info = vvae_run_info { flags: VVAE_RUN_HAS_STREAM, cuda_stream: stream.handle, ..run_info() };
    let (first, second) = (pool.open(), pool.open());
    for vae in [&first, &second] {
        vae.decode(&latent, &mut video(&latent, VVAE_DTYPE_F32)).unwrap();
    }
    // Freeing the second handle releases the weights while the first still works with them.
    stream.delay(Duration::from_millis(60));
    first.run("decode", &on_device(&latent, &from), &on_device(&expected, &to), &info).unwrap();
    first.trim(VVAE_TRIM_WEIGHTS).unwrap();
    assert_eq!(second.free(), VVAE_OK);
    assert_eq!(first.free(), VVAE_OK);
    assert_eq!(pool.given(), 0);
    stream.wait();
    assert!(to.read() == expected.bytes());
}
