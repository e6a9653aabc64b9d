//! The kernels of a precision, loaded from the PTX that is embedded in the library.

use std::ffi::CStr;
use std::sync::Arc;

use super::tiling;
use crate::backend::Precision;
use crate::backend::cuda::driver::{Context, Kernel, Module};
use crate::error::Result;

/// A convolution, and the same with partial sums in and out.
#[derive(Clone, Copy)]
pub struct ConvKernels {
    pub plain: Kernel,
    pub partial_sums: Kernel,
}

/// Every kernel of a precision, loaded.
pub struct Kernels {
    /// Convolution of many channels for compute capability 9.0: tensor copies and warpgroup products.
    pub conv_wgmma: Option<ConvKernels>,
    /// Pairs of frames by Winograd in time, likewise.
    pub conv_wgmma_pair: Option<Kernel>,
    /// The same as `conv_wgmma` for compute capability 8.0 and later.
    pub conv_mma: ConvKernels,
    pub conv_in: Kernel,
    /// The same, with the next layer's norm applied to the output.
    pub conv_in_norm: Kernel,
    pub conv_in_silu: Kernel,
    pub conv_out: Kernel,
    pub norm_apply: Kernel,
    pub norm_silu: Kernel,
    pub norm_finalize: Kernel,
    pub norm_statistics: Kernel,
    pub copy_rows: Kernel,
    pub attention: Kernel,
    /// The same for compute capability 9.0.
    pub attention_wgmma: Option<Kernel>,
    pub load: Kernel,
    pub store: Kernel,
    pub blend: Kernel,
    _modules: Vec<Module>,
}

macro_rules! ptx {
    ($precision:expr, $name:literal) => {
        match $precision {
            Precision::Fp16 => include_str!(concat!("../kernels/ptx/fp16/", $name, ".ptx")),
            Precision::Bf16 => include_str!(concat!("../kernels/ptx/bf16/", $name, ".ptx")),
            Precision::Fp32 => include_str!(concat!("../kernels/ptx/fp32/", $name, ".ptx")),
        }
    };
}

impl Kernels {
    /// The best for the context's [`KernelArch`](crate::backend::cuda::driver::KernelArch).
    pub fn new(context: &Arc<Context>, precision: Precision) -> Result<Kernels> {
        let gpu = &context.gpu;
        let module = |ptx| Module::new(context, ptx);
        let (conv_in, conv_out) = (module(ptx!(precision, "conv_in"))?, module(ptx!(precision, "conv_out"))?);
        let (norm, attention) = (module(ptx!(precision, "norm"))?, module(ptx!(precision, "attention"))?);
        let (conv, pixels) = (module(ptx!(precision, "conv_mma"))?, module(ptx!(precision, "pixels"))?);
        let wgmma = match precision {
            Precision::Fp16 => Some([
                include_str!("../kernels/ptx/fp16/conv_wgmma.ptx"),
                include_str!("../kernels/ptx/fp16/attention_wgmma.ptx"),
            ]),
            Precision::Bf16 => Some([
                include_str!("../kernels/ptx/bf16/conv_wgmma.ptx"),
                include_str!("../kernels/ptx/bf16/attention_wgmma.ptx"),
            ]),
            Precision::Fp32 => None,
        };
        let [wgmma, attention_wgmma] = match wgmma.filter(|_| gpu.kernel_arch().has_wgmma()) {
            Some([conv, attention]) => [Some(module(conv)?), Some(module(attention)?)],
            None => [None, None],
        };
        // In bf16 the sums of two frames would lose too much.
        let pair = include_str!("../kernels/ptx/fp16/conv_wgmma_pair.ptx");
        let has_pairs = wgmma.is_some() && precision == Precision::Fp16;
        let pair = has_pairs.then(|| module(pair)).transpose()?;
        let both = |module: &Module, [plain, sums]: [&CStr; 2], shared: u32| {
            Ok(ConvKernels { plain: module.kernel(plain, shared)?, partial_sums: module.kernel(sums, shared)? })
        };
        // `conv_mma` has no persistent blocks that others would have to share a multiprocessor with.
        let co_resident = |name| if wgmma.is_some() { norm.co_resident_kernel(name) } else { norm.kernel(name, 0) };
        let wgmma_names = [c"conv_wgmma", c"conv_wgmma_partial"];
        let conv_wgmma = wgmma.as_ref().map(|module| both(module, wgmma_names, tiling::CONV_WGMMA_SHARED));
        Ok(Kernels {
            conv_wgmma: conv_wgmma.transpose()?,
            conv_wgmma_pair: pair
                .as_ref()
                .map(|pair| pair.kernel(c"conv_wgmma_pair", tiling::CONV_WGMMA_SHARED))
                .transpose()?,
            conv_mma: both(&conv, [c"conv_mma", c"conv_mma_partial"], tiling::CONV_MMA_SHARED)?,
            conv_in: conv_in.kernel(c"conv_in", tiling::conv_in_shared(precision))?,
            conv_in_norm: conv_in.kernel(c"conv_in_norm", tiling::conv_in_shared(precision))?,
            conv_in_silu: conv_in.kernel(c"conv_in_silu", tiling::conv_in_shared(precision))?,
            conv_out: conv_out.kernel(c"conv_out", tiling::conv_out_shared(precision))?,
            norm_apply: norm.kernel(c"norm_apply", 0)?,
            norm_silu: co_resident(c"norm_silu")?,
            norm_finalize: norm.kernel(c"norm_finalize", 0)?,
            norm_statistics: norm.kernel(c"norm_statistics", 0)?,
            copy_rows: co_resident(c"copy_rows")?,
            // Data-centre cards have the shared memory for twice the keys at a time.
            attention: match gpu.shared_bytes >= tiling::ATTENTION_128_SHARED {
                true => attention.kernel(c"attention_128", tiling::ATTENTION_128_SHARED)?,
                false => attention.kernel(c"attention_64", tiling::ATTENTION_64_SHARED)?,
            },
            attention_wgmma: attention_wgmma
                .as_ref()
                .map(|module| module.kernel(c"attention_wgmma", tiling::ATTENTION_WGMMA_SHARED))
                .transpose()?,
            load: pixels.kernel(c"load", 0)?,
            store: pixels.kernel(c"store", 0)?,
            blend: pixels.kernel(c"blend", 0)?,
            _modules: [conv_in, conv_out, norm, attention, pixels, conv]
                .into_iter()
                .chain(wgmma)
                .chain(attention_wgmma)
                .chain(pair)
                .collect(),
        })
    }
}
