//! A cancel acts on the call that is running, from its first moment on, and on no other.

mod common;

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;

use common::{Buffer, Vae, api, outcome, run_info, small};
use video_vae::capi::*;

/// Lets a run wait, before it does any work, until its cancel was sent.
unsafe extern "C" fn wait_for_cancel(sent: *mut c_void, _: u64, _: u64, _: *const c_char) -> i32 {
    // SAFETY: the test passes a flag that outlives the run.
    let sent = unsafe { &*sent.cast::<AtomicBool>() };
    while !sent.load(SeqCst) {
        thread::yield_now();
    }
    0
}

/// A run info of a later version, which takes a while to read: a cancel has time to come before the run does any work.
#[repr(C)]
struct Long {
    info: vvae_run_info,
    rest: [u8; 4096 - size_of::<vvae_run_info>()],
}

/// A second thread watches until the handle is busy, and cancels at once: often before the run has even read its
/// tensors.
#[test]
fn a_cancel_at_the_very_start_of_a_run_acts() {
    let vae = Vae::open(&small()).unwrap();
    let latent = Buffer::new(VVAE_DTYPE_F32, [1, 16, 1, 1, 1]);
    let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 8, 8]);
    let decode = |run: *const vvae_run_info| {
        // SAFETY: the tensors have memory, and the run info is as long as it says.
        outcome(vae.0, unsafe { (api().vvae_decode)(vae.0, &latent.tensor(), &video.tensor(), run) })
    };
    decode(&run_info()).expect("weights are loaded once");
    for round in 0..300 {
        let (watching, sent) = (AtomicBool::new(false), AtomicBool::new(false));
        let user = std::ptr::from_ref(&sent).cast_mut().cast();
        let info =
            vvae_run_info { struct_size: 4096, progress: Some(wait_for_cancel), progress_user: user, ..run_info() };
        let run = Long { info, rest: [0; _] };
        let stopped = thread::scope(|scope| {
            scope.spawn(|| {
                let vae = &vae;
                watching.store(true, SeqCst);
                // Nothing to trim is an argument error; a busy handle is another one.
                // SAFETY: a handle, and any flags.
                while unsafe { (api().vvae_trim)(vae.0, 0) } != VVAE_ERROR_STATE {}
                vae.cancel().unwrap();
                sent.store(true, SeqCst);
            });
            while !watching.load(SeqCst) {
                std::hint::spin_loop();
            }
            loop {
                match decode((&raw const run).cast()) {
                    Err(busy) if busy.status == VVAE_ERROR_STATE => {}
                    done => break done,
                }
            }
        });
        stopped.expect_err(&format!("the cancel of round {round} was lost")).says(VVAE_ERROR_CANCELLED, &[]);
        decode(&run_info()).expect("a cancel is for one call");
    }
}
