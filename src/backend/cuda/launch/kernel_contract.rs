//! What Rust and the kernels have to agree on, read from the committed PTX and from the text of the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::params::{
    AddParams, AttentionParams, BlendParams, CacheParams, ConvParams, CopyParams, FinalizeParams, LoadParams,
    MappedLoadParams, MappedStoreParams, NormParams, OutParams, PoolParams, StatisticsParams, StoreParams,
};
use super::tiling::{self, ConvIn, TileWidths};
use crate::backend::Precision;
use crate::backend::cuda::driver::{Bundle, KernelArch};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cuda/kernels")
}

fn source(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap_or_else(|why| panic!("{name}: {why}"))
}

/// The number in `constexpr int NAME = NUMBER;`.
fn constant(file: &str, name: &str) -> u64 {
    let (text, definition) = (source(file), format!("constexpr int {name} = "));
    let at = text.find(&definition).unwrap_or_else(|| panic!("{file} has no `{definition}`")) + definition.len();
    let number: String = text[at..].chars().take_while(char::is_ascii_digit).collect();
    assert_eq!(text[at + number.len()..].chars().next(), Some(';'), "{file}: {name} is no plain number");
    number.parse().unwrap()
}

/// (alignment, bytes) of each kernel's parameter: `.param .align 64 .b8 conv_in_param_0[3712]`.
fn ptx_parameters(precision: Precision) -> BTreeMap<String, (usize, usize)> {
    let mut found = BTreeMap::new();
    for file in std::fs::read_dir(folder().join("ptx").join(precision.name())).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for line in text.lines().filter(|line| line.contains("_param_0[")) {
            let Some(rest) = line.trim().strip_prefix(".param .align ") else { continue };
            let (align, rest) = rest.split_once(" .b8 ").unwrap();
            let (name, bytes) = rest.split_once("_param_0[").unwrap();
            let bytes = bytes.trim_end_matches([']', ',']);
            found.insert(name.to_owned(), (align.parse().unwrap(), bytes.parse().unwrap()));
        }
    }
    found
}

#[test]
fn parameter_structs_are_as_large_as_the_kernels_expect() {
    fn layout<T>() -> (usize, usize) {
        (align_of::<T>(), size_of::<T>())
    }
    for precision in Precision::ALL {
        let kernels = ptx_parameters(precision);
        for (kernel, found) in &kernels {
            let expected = match kernel.as_str() {
                "conv_wgmma" | "conv_wgmma_96" | "conv_wgmma_down" => layout::<ConvParams>(),
                "conv_wgmma_pair" | "conv_wgmma_pair_96" | "conv_wgmma_pair_up" => layout::<ConvParams>(),
                "conv_wgmma_columns" => layout::<ConvParams>(),
                "conv_mma" | "conv_mma_96" | "conv_mma_partial" | "conv_mma_up" => layout::<ConvParams>(),
                "conv_mma_pair" | "conv_mma_pair_96" | "conv_mma_pair_up" => layout::<ConvParams>(),
                "conv_in" | "conv_in_alone" | "conv_in_norm" | "conv_in_silu" => layout::<ConvParams>(),
                "conv_out" | "conv_out_pixel" | "conv_out_alone" | "conv_out_pixel_alone" => layout::<OutParams>(),
                "norm_finalize" => layout::<FinalizeParams>(),
                "norm_statistics" => layout::<StatisticsParams>(),
                "norm_apply" | "norm_silu" | "norm_pixel" | "norm_pixel_silu" => layout::<NormParams>(),
                "copy_rows" => layout::<CopyParams>(),
                "cache_store" | "cache_restore" | "cache_round" => layout::<CacheParams>(),
                "attention" | "attention_wgmma" | "attention_wide" => layout::<AttentionParams>(),
                "pool" => layout::<PoolParams>(),
                "add" => layout::<AddParams>(),
                "load" => layout::<LoadParams>(),
                "load_mapped" => layout::<MappedLoadParams>(),
                "store" => layout::<StoreParams>(),
                "store_mapped" => layout::<MappedStoreParams>(),
                "blend" => layout::<BlendParams>(),
                other => panic!("{other} has no parameter struct"),
            };
            assert_eq!(*found, expected, "(alignment, bytes) of {kernel} in {}", precision.name());
        }
        let mut loaded: BTreeSet<&str> = include_str!("kernels.rs")
            .split("c\"")
            .skip(1)
            .filter_map(|rest| rest.split_once('"').map(|(name, _)| name))
            .collect();
        if precision == Precision::Fp32 {
            loaded.retain(|name| ["_wgmma", "_pair", "_up"].iter().all(|part| !name.contains(part)));
        }
        assert_eq!(loaded, kernels.keys().map(String::as_str).collect(), "kernels in {}", precision.name());
    }
}

#[test]
fn shared_memory_is_what_the_kernels_declare() {
    for (precision, suffix) in [(Precision::Fp16, "2B"), (Precision::Bf16, "2B"), (Precision::Fp32, "4B")] {
        let shared = |file: &str| constant(file, &format!("SHARED_BYTES_{suffix}")) as u32;
        let alone = |file: &str| constant(file, &format!("ALONE_SHARED_BYTES_{suffix}")) as u32;
        assert_eq!(ConvIn { precision, alone: false }.shared(), shared("conv_in.cu"));
        assert_eq!(ConvIn { precision, alone: true }.shared(), alone("conv_in.cu"));
        assert_eq!(tiling::conv_out_shared(precision, 3), shared("conv_out.cu"));
        assert_eq!(tiling::conv_out_shared(precision, 1), alone("conv_out.cu"));
        assert_eq!(tiling::attention_wide_shared(precision), shared("attention_wide.cu"));
    }
    assert_eq!(u64::from(tiling::CONV_WGMMA_SHARED), constant("conv_wgmma.cu", "SHARED_BYTES"));
    assert_eq!(u64::from(tiling::CONV_WGMMA_SHARED), constant("convolve_pairs.cuh", "SHARED_BYTES"));
    assert_eq!(u64::from(tiling::CONV_MMA_SHARED), constant("conv_mma.cu", "SHARED_BYTES"));
    assert_eq!(u64::from(tiling::CONV_MMA_PAIR_SHARED), constant("conv_mma_pair.cu", "SHARED_BYTES"));
    assert_eq!(u64::from(tiling::CONV_MMA_96_SHARED), constant("conv_mma.cu", "NARROW_SHARED_BYTES"));
    assert_eq!(u64::from(tiling::CONV_MMA_PAIR_96_SHARED), constant("conv_mma_pair.cu", "NARROW_SHARED_BYTES"));
    assert_eq!(u64::from(tiling::ATTENTION_WGMMA_SHARED), constant("attention_wgmma.cu", "SHARED_BYTES"));
    assert_eq!(u64::from(tiling::ATTENTION_SHARED), constant("attention.cu", "SHARED_BYTES"));
}

#[test]
fn tiles_and_threads_are_what_the_kernels_declare() {
    for (precision, suffix) in [(Precision::Fp16, "2B"), (Precision::Bf16, "2B"), (Precision::Fp32, "4B")] {
        let of = |file: &str, name: &str| constant(file, &format!("{name}_{suffix}"));
        assert_eq!(
            tiling::conv_out_tile(precision),
            (of("conv_out.cu", "TILE_ROWS"), constant("conv_out.cu", "TILE_COLS"))
        );
        assert_eq!(tiling::attention_queries(precision), of("attention.cu", "QUERIES"));
        assert_eq!(tiling::attention_wide_queries(precision), of("attention_wide.cu", "QUERIES"));
        assert_eq!(u64::from(tiling::longest_conv_in_run(precision)), of("conv_in.cu", "MAX_RUN"));
        assert_eq!(u64::from(tiling::conv_mma_threads(precision)), of("conv_mma.cu", "THREADS"));
    }
    for (threads, file, name) in [
        (tiling::CONV_IN_THREADS, "conv_in.cu", "THREADS"),
        (tiling::CONV_OUT_THREADS, "conv_out.cu", "THREADS"),
        (tiling::CONV_OUT_ALONE_THREADS, "conv_out.cu", "ALONE_THREADS"),
        (tiling::CONV_OUT_ALONE_BLOCKS, "conv_out.cu", "ALONE_BLOCKS_PER_SM"),
        (tiling::CONV_WGMMA_THREADS, "conv_wgmma.cu", "THREADS"),
        (tiling::CONV_WGMMA_THREADS, "convolve_pairs.cuh", "THREADS"),
        (tiling::CONV_MMA_PAIR_THREADS, "conv_mma_pair.cu", "THREADS"),
        (tiling::CONV_MMA_96_THREADS, "conv_mma.cu", "NARROW_THREADS"),
        (tiling::CONV_MMA_PAIR_96_THREADS, "conv_mma_pair.cu", "NARROW_THREADS"),
        (tiling::PAIR_ROW_BYTES as u32, "mainloop_mma.cuh", "STEP_BYTES"),
        (tiling::CONV_PAIR_CLUSTER, "mainloop_pair.cuh", "PAIR_CLUSTER"),
        (tiling::PAIR_ROW_BYTES as u32, "mainloop_pair.cuh", "PAIR_ROW_BYTES"),
        (tiling::CONV_PAIR_BLOCK.0 as u32, "mainloop_wgmma.cuh", "GROUP_ROWS"),
        (tiling::CONV_PAIR_BLOCK.1 as u32, "mainloop_wgmma.cuh", "GROUP_COLS"),
        (tiling::ATTENTION_THREADS, "attention.cu", "THREADS"),
        (tiling::ATTENTION_WGMMA_THREADS, "attention_wgmma.cu", "THREADS"),
        (tiling::ATTENTION_WGMMA_BOX, "attention_wgmma.cu", "BOX_PIXELS"),
        (tiling::ATTENTION_WIDE_THREADS, "attention_wide.cu", "THREADS"),
        (tiling::LEVEL_THREADS, "levels.cu", "THREADS"),
        (tiling::STATISTICS_THREADS, "norm.cu", "THREADS"),
        (tiling::PIXEL_THREADS, "pixels.cu", "THREADS"),
        (tiling::CO_RESIDENT_THREADS, "norm.cuh", "CORESIDENT_THREADS"),
        (tiling::CONV_IN_BLOCKS, "conv_in.cu", "BLOCKS_PER_SM"),
        (tiling::CONV_IN_ALONE_BLOCKS, "conv_in.cu", "ALONE_BLOCKS_PER_SM"),
    ] {
        assert_eq!(u64::from(threads), constant(file, name), "{name} of {file}");
    }
    for file in ["conv_in.cu", "mainloop_mma.cuh"] {
        let tile = (constant(file, "TILE_ROWS") as i32, constant(file, "TILE_COLS") as i32);
        assert_eq!(tiling::CONV_TILE, tile, "{file}");
    }
    assert_eq!(tiling::STATISTICS_RECORD, (constant("norm.cuh", "RECORD_ROWS"), constant("norm.cuh", "RECORD_COLS")));
    assert_eq!(tiling::ROW_BYTES, constant("conv.cuh", "ROW_BYTES"));
    assert_eq!(tiling::TILE_CHANNELS, constant("conv.cuh", "TILE_CHANNELS"));
    assert_eq!(TileWidths::WIDE.bytes(), constant("conv.cuh", "WEIGHT_TILE_BYTES"));
    assert_eq!(TileWidths::NARROW.columns, constant("conv.cuh", "NARROW_CHANNELS"));
    assert_eq!(TileWidths::NARROW.row_bytes, constant("conv.cuh", "NARROW_ROW_BYTES"));
    assert_eq!(tiling::UNIT_BYTES, constant("common.cuh", "UNIT_BYTES"));
    assert_eq!(tiling::CONV_OUT_PIXEL_BYTES, 4 * constant("conv_out.cu", "PARTIAL_FLOATS"));
    assert_eq!(tiling::ATTENTION_WGMMA_QUERIES, constant("attention_wgmma.cu", "QUERIES"));
    assert_eq!(tiling::ATTENTION_WGMMA_CLUSTER, constant("attention_wgmma.cu", "CLUSTER"));
    assert_eq!(tiling::MAX_MAPS as u64, constant("pixels.cu", "MAX_MAPS"));
    assert_eq!(tiling::MOST_ATTENTION_CHANNELS, constant("attention.cuh", "MAX_CHANNELS"));
    assert_eq!(tiling::MOST_WIDE_ATTENTION_CHANNELS, constant("attention_wide.cu", "MAX_WIDE_CHANNELS"));
}

#[test]
fn max_frames_is_defined_once_in_the_kernels() {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().path());
    let sources = files.filter(|path| path.extension().is_some_and(|ext| ext == "cu" || ext == "cuh"));
    let texts = sources.map(|path| std::fs::read_to_string(path).unwrap());
    let definitions: usize = texts.map(|text| text.matches("MAX_FRAMES = ").count()).sum();
    assert_eq!((definitions, constant("common.cuh", "MAX_FRAMES")), (1, tiling::MAX_FRAMES as u64));
}

/// A non-coherent load may miss what the same launch writes.
#[test]
fn norms_that_run_in_place_load_pixels_coherently() {
    for precision in Precision::ALL {
        let text = source(&format!("ptx/{}/norm.ptx", precision.name()));
        for name in ["norm_apply", "norm_silu", "norm_pixel", "norm_pixel_silu"] {
            let (_, kernel) = text.split_once(&format!(".entry {name}(")).unwrap();
            let kernel = kernel.split(".entry ").next().unwrap();
            let pixels: Vec<&str> = kernel.lines().filter(|line| line.contains("L1::no_allocate.v4")).collect();
            assert!(!pixels.is_empty() && pixels.iter().all(|load| !load.contains(".nc.")), "{name}: {pixels:?}");
        }
    }
}

/// What `compile.py --check` tells too, without NVRTC: a merge that forgets the bundles fails here.
#[test]
fn bundles_hold_the_committed_ptx_and_machine_code_of_it() {
    const COMMON: [(i32, i32); 5] = [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)];
    for precision in Precision::ALL {
        let names = |kind: &str| -> BTreeSet<String> {
            let files = std::fs::read_dir(folder().join(kind).join(precision.name())).unwrap();
            files.map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names("ptx"), names("bundles"), "{}", precision.name());
        for name in names("ptx") {
            let read = |path: String| std::fs::read(folder().join(path)).unwrap();
            let (text, packed) = (format!("ptx/{}/{name}.ptx", precision.name()), name.clone().leak());
            let bundle = Bundle::new(packed, read(format!("bundles/{}/{name}.bundle", precision.name())).leak());
            let (text, ptx) = (read(text), bundle.ptx().unwrap());
            assert!(ptx.strip_suffix(&[0]) == Some(&text), "{name}: run compile.py");
            let text = String::from_utf8(text).unwrap();
            let only_hopper = text.contains(".target sm_90a");
            for (major, minor) in COMMON {
                let code = bundle.machine_code(KernelArch::new(major, minor)).unwrap();
                assert_eq!(code.is_some(), !only_hopper || major == 9, "{name} for {major}.{minor}");
                let Some(code) = code else { continue };
                // In an ELF file's flags: the first byte up to version 7 of the ABI, then the second.
                let architecture = code[48 + usize::from(code[8] > 7)];
                assert_eq!((&code[..4], i32::from(architecture)), (&b"\x7fELF"[..], major * 10 + minor), "{name}");
                for entry in text.split(".entry ").skip(1) {
                    let section = format!(".text.{}\0", entry.split('(').next().unwrap());
                    let found = code.windows(section.len()).any(|bytes| bytes == section.as_bytes());
                    assert!(found, "{name} for {major}.{minor} has no {section}");
                }
            }
        }
    }
}
