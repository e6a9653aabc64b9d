//! Options of a backend: the host's allocator, instructions, threads.

use super::case::{PlainWeights, layout};
use super::*;
use crate::backend::Callbacks;

unsafe extern "C" fn refuse(user: *mut std::ffi::c_void, bytes: u64, _: u64) -> *mut std::ffi::c_void {
    // SAFETY: the test passes its counter.
    unsafe { *user.cast::<u64>() = bytes };
    std::ptr::null_mut()
}

unsafe extern "C" fn forget(_: *mut std::ffi::c_void, _: *mut std::ffi::c_void, _: u64) {}

#[test]
fn memory_comes_from_the_allocator_only() {
    let mut asked = 0u64;
    let allocator = HostAllocator::Host(Callbacks { alloc: refuse, free: forget, user: (&raw mut asked).cast() });
    let cpu = Cpu::new(CpuOptions { allocator, ..CpuOptions::default() }).unwrap();
    let error = cpu.allocate(777, PinnedBytes::default()).err().unwrap();
    assert!(matches!(&error, Error::Memory(text) if text.contains("777")), "{error}");
    let layout = layout(20, 33, Window::Same, Prologue::NormSilu);
    let mut weights = PlainWeights::new(&layout, Precision::Fp32, &mut Lcg(1));
    let error = crate::testing::prepare(&cpu, (&(), 0), &layout, &mut weights).err().unwrap();
    let bytes = cpu.weight_bytes(&layout);
    assert!(matches!(&error, Error::Memory(text) if text.contains(&bytes.to_string())), "{error}");
    assert_eq!(asked, bytes);
}

#[test]
fn missing_instructions_are_named() {
    for set in [Instructions::Avx512, Instructions::Avx2, Instructions::Neon, Instructions::Portable] {
        match Cpu::new(CpuOptions { instructions: set, threads: Some(1), ..CpuOptions::default() }) {
            Ok(cpu) => assert_eq!(cpu.instructions(), set),
            Err(error) => assert!(matches!(&error, Error::Device(text) if text.contains("lacks")), "{error}"),
        }
    }
    let none = Cpu::new(CpuOptions { threads: Some(0), ..CpuOptions::default() });
    assert!(matches!(none, Err(Error::Argument(_))));
}
