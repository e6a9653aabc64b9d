//! The kernels of a precision, from the bundles that are embedded in the library.

use std::sync::Arc;

use super::tiling::{self, ConvIn};
use crate::backend::Precision;
use crate::backend::cuda::driver::{Bundle, Context, Kernel, Module};
use crate::checksum::Checksum;
use crate::error::Result;
use crate::ir::Norm;

/// Convolutions of many channels for compute capability 9.0: tensor copies and warpgroup products.
pub struct WgmmaKernels {
    pub plain: Kernel,
    /// With narrow tiles.
    pub plain_96: Kernel,
    /// For the window `Down`, with partial sums in and out.
    pub down: Kernel,
    /// Pairs of frames by Winograd in time.
    pub pair: Kernel,
    pub pair_96: Kernel,
    /// The same for the window `Up`.
    pub pair_up: Kernel,
    /// Pairs of columns by Winograd along rows.
    pub columns: Kernel,
}

impl WgmmaKernels {
    fn of(bundles: &TwoByteBundles, module: impl Fn(Bundle) -> Arc<Module>) -> WgmmaKernels {
        let [conv, pair, columns] =
            [bundles.conv_wgmma, bundles.conv_wgmma_pair, bundles.conv_wgmma_columns].map(module);
        let kernel = |module: &Arc<Module>, name| module.kernel(name, tiling::CONV_WGMMA_SHARED);
        WgmmaKernels {
            plain: kernel(&conv, c"conv_wgmma"),
            plain_96: kernel(&conv, c"conv_wgmma_96"),
            down: kernel(&conv, c"conv_wgmma_down"),
            pair: kernel(&pair, c"conv_wgmma_pair"),
            pair_96: kernel(&pair, c"conv_wgmma_pair_96"),
            pair_up: kernel(&pair, c"conv_wgmma_pair_up"),
            columns: kernel(&columns, c"conv_wgmma_columns"),
        }
    }
}

/// Every kernel of a precision. Modules are loaded when one of their kernels is first used.
pub struct Kernels {
    pub conv_wgmma: Option<WgmmaKernels>,
    /// Convolutions of many channels, from compute capability 8.0 on.
    pub conv_mma: Kernel,
    /// The same with narrow tiles.
    pub conv_mma_96: Kernel,
    /// `conv_mma` with partial sums in and out.
    pub conv_mma_partial: Kernel,
    /// `conv_mma` for the window `Up`. Products of f32 leave no registers for it.
    pub conv_mma_up: Option<Kernel>,
    /// Pairs of frames by Winograd in time, the same with narrow tiles, and for the window `Up`.
    pub conv_mma_pair: Option<Kernel>,
    pub conv_mma_pair_96: Option<Kernel>,
    pub conv_mma_pair_up: Option<Kernel>,
    pub conv_in: Kernel,
    /// For frames of one term each.
    pub conv_in_alone: Kernel,
    /// The same, with the next layer's norm applied to the output.
    pub conv_in_norm: Kernel,
    pub conv_in_silu: Kernel,
    conv_out: Kernel,
    conv_out_pixel: Kernel,
    /// For output frames that see one input frame each.
    conv_out_alone: Kernel,
    conv_out_pixel_alone: Kernel,
    pub norm_apply: Kernel,
    pub norm_silu: Kernel,
    /// The norm of pixels, and the same with SiLU.
    pub norm_pixel: Kernel,
    pub norm_pixel_silu: Kernel,
    pub norm_finalize: Kernel,
    pub norm_statistics: Kernel,
    pub copy_rows: Kernel,
    /// Rows of causal caches to 8 bits, back, and both.
    pub cache_store: Kernel,
    pub cache_restore: Kernel,
    pub cache_round: Kernel,
    pub attention: Kernel,
    /// The same for compute capability 9.0.
    pub attention_wgmma: Option<Kernel>,
    /// For more channels than either has.
    pub attention_wide: Kernel,
    /// Shortcuts around levels.
    pub pool: Kernel,
    pub add: Kernel,
    pub load: Kernel,
    pub load_mapped: Kernel,
    pub store: Kernel,
    pub store_mapped: Kernel,
    pub blend: Kernel,
}

macro_rules! bundle {
    ($name:literal of $folder:literal) => {
        Bundle::new($name, include_bytes!(concat!("../kernels/bundles/", $folder, "/", $name, ".bundle")))
    };
    ($name:literal in $precision:expr) => {
        match $precision {
            Precision::Fp16 => bundle!($name of "fp16"),
            Precision::Bf16 => bundle!($name of "bf16"),
            Precision::Fp32 => bundle!($name of "fp32"),
        }
    };
}

/// What exists for elements of two bytes only.
struct TwoByteBundles {
    conv_wgmma: Bundle,
    conv_wgmma_pair: Bundle,
    conv_wgmma_columns: Bundle,
    conv_mma_pair: Bundle,
    attention_wgmma: Bundle,
}

impl TwoByteBundles {
    fn of(precision: Precision) -> Option<TwoByteBundles> {
        macro_rules! bundles {
            ($folder:literal) => {
                Some(TwoByteBundles {
                    conv_wgmma: bundle!("conv_wgmma" of $folder),
                    conv_wgmma_pair: bundle!("conv_wgmma_pair" of $folder),
                    conv_wgmma_columns: bundle!("conv_wgmma_columns" of $folder),
                    conv_mma_pair: bundle!("conv_mma_pair" of $folder),
                    attention_wgmma: bundle!("attention_wgmma" of $folder),
                })
            };
        }
        match precision {
            Precision::Fp16 => bundles!("fp16"),
            Precision::Bf16 => bundles!("bf16"),
            Precision::Fp32 => None,
        }
    }
}

/// Of the embedded kernels that decide how fast a precision is.
pub fn checksum(precision: Precision) -> u64 {
    let mut sum = Checksum::default();
    let common = [bundle!("conv_mma" in precision), bundle!("norm" in precision)];
    let own = TwoByteBundles::of(precision)
        .map(|of| [of.conv_wgmma, of.conv_mma_pair, of.conv_wgmma_pair, of.conv_wgmma_columns]);
    common.iter().chain(own.iter().flatten()).for_each(|bundle| sum.add(bundle.bytes()));
    sum.value()
}

impl Kernels {
    /// The best for the context's [`KernelArch`](crate::backend::cuda::driver::KernelArch).
    pub fn new(context: &Arc<Context>, precision: Precision) -> Kernels {
        let module = |bundle| Module::new(context, bundle);
        let (conv_in, conv_out) = (module(bundle!("conv_in" in precision)), module(bundle!("conv_out" in precision)));
        let conv_out_pixel = module(bundle!("conv_out_pixel" in precision));
        let (norm, attention) = (module(bundle!("norm" in precision)), module(bundle!("attention" in precision)));
        let (cache, levels) = (module(bundle!("cache_u8" in precision)), module(bundle!("levels" in precision)));
        let attention_wide = module(bundle!("attention_wide" in precision));
        let (conv, pixels) = (module(bundle!("conv_mma" in precision)), module(bundle!("pixels" in precision)));
        let two_bytes = TwoByteBundles::of(precision);
        let on_hopper = two_bytes.as_ref().filter(|_| context.gpu.kernel_arch().has_wgmma());
        let conv_wgmma = on_hopper.map(|bundles| WgmmaKernels::of(bundles, module));
        let attention_wgmma = on_hopper.map(|bundles| module(bundles.attention_wgmma));
        let mma_pair_module = two_bytes.as_ref().map(|bundles| module(bundles.conv_mma_pair));
        let mma_pair = |name, shared| mma_pair_module.as_ref().map(|module| module.kernel(name, shared));
        let conv_in_shared = |alone| ConvIn { precision, alone }.shared();
        // `conv_mma` has no persistent blocks that others would have to share a multiprocessor with.
        let co_resident = |module: &Arc<Module>, name| match &conv_wgmma {
            Some(_) => module.co_resident_kernel(name),
            None => module.kernel(name, 0),
        };
        Kernels {
            conv_mma: conv.kernel(c"conv_mma", tiling::CONV_MMA_SHARED),
            conv_mma_96: conv.kernel(c"conv_mma_96", tiling::CONV_MMA_96_SHARED),
            conv_mma_partial: conv.kernel(c"conv_mma_partial", tiling::CONV_MMA_SHARED),
            conv_mma_up: (precision != Precision::Fp32).then(|| conv.kernel(c"conv_mma_up", tiling::CONV_MMA_SHARED)),
            conv_mma_pair: mma_pair(c"conv_mma_pair", tiling::CONV_MMA_PAIR_SHARED),
            conv_mma_pair_96: mma_pair(c"conv_mma_pair_96", tiling::CONV_MMA_PAIR_96_SHARED),
            conv_mma_pair_up: mma_pair(c"conv_mma_pair_up", tiling::CONV_MMA_PAIR_SHARED),
            conv_in: conv_in.kernel(c"conv_in", conv_in_shared(false)),
            conv_in_alone: conv_in.kernel(c"conv_in_alone", conv_in_shared(true)),
            conv_in_norm: conv_in.kernel(c"conv_in_norm", conv_in_shared(false)),
            conv_in_silu: conv_in.kernel(c"conv_in_silu", conv_in_shared(false)),
            conv_out: conv_out.kernel(c"conv_out", tiling::conv_out_shared(precision, 3)),
            conv_out_pixel: conv_out_pixel.kernel(c"conv_out_pixel", tiling::conv_out_shared(precision, 3)),
            conv_out_alone: conv_out.kernel(c"conv_out_alone", tiling::conv_out_shared(precision, 1)),
            conv_out_pixel_alone: conv_out_pixel.kernel(c"conv_out_pixel_alone", tiling::conv_out_shared(precision, 1)),
            norm_apply: norm.kernel(c"norm_apply", 0),
            norm_silu: co_resident(&norm, c"norm_silu"),
            norm_pixel: co_resident(&norm, c"norm_pixel"),
            norm_pixel_silu: co_resident(&norm, c"norm_pixel_silu"),
            norm_finalize: norm.kernel(c"norm_finalize", 0),
            norm_statistics: norm.kernel(c"norm_statistics", 0),
            copy_rows: co_resident(&norm, c"copy_rows"),
            cache_store: co_resident(&cache, c"cache_store"),
            cache_restore: co_resident(&cache, c"cache_restore"),
            cache_round: co_resident(&cache, c"cache_round"),
            attention: attention.kernel(c"attention", tiling::ATTENTION_SHARED),
            attention_wgmma: attention_wgmma
                .map(|module| module.kernel(c"attention_wgmma", tiling::ATTENTION_WGMMA_SHARED)),
            attention_wide: attention_wide.kernel(c"attention_wide", tiling::attention_wide_shared(precision)),
            pool: levels.kernel(c"pool", 0),
            add: levels.kernel(c"add", 0),
            load: pixels.kernel(c"load", 0),
            load_mapped: pixels.kernel(c"load_mapped", 0),
            store: pixels.kernel(c"store", 0),
            store_mapped: pixels.kernel(c"store_mapped", 0),
            blend: pixels.kernel(c"blend", 0),
            conv_wgmma,
        }
    }

    /// The convolution to pixels, with this norm before it.
    pub fn conv_out(&self, norm: Norm) -> &Kernel {
        match norm {
            Norm::Group { .. } => &self.conv_out,
            Norm::Pixel => &self.conv_out_pixel,
        }
    }

    /// The same for output frames that see one input frame each.
    pub fn conv_out_alone(&self, norm: Norm) -> &Kernel {
        match norm {
            Norm::Group { .. } => &self.conv_out_alone,
            Norm::Pixel => &self.conv_out_pixel_alone,
        }
    }

    /// Loads what every job uses beside its convolutions. The context has to be current.
    pub fn load_common(&self) -> Result<()> {
        let norms = [
            &self.norm_apply,
            &self.norm_silu,
            &self.norm_pixel,
            &self.norm_pixel_silu,
            &self.norm_finalize,
            &self.norm_statistics,
            &self.copy_rows,
            &self.cache_store,
        ];
        let pixels = [&self.load, &self.load_mapped, &self.store, &self.store_mapped, &self.blend];
        let others = [&self.pool, &self.add].into_iter().chain(pixels);
        let attention = [self.attention_wgmma.as_ref().unwrap_or(&self.attention), &self.attention_wide];
        norms.into_iter().chain(others).chain(attention).try_for_each(|kernel| kernel.function().map(|_| ()))
    }
}
