//! Kernels, compiled ahead to SPIR-V by `shaders/compile.sh`, and their pipelines.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ash::{util, vk};
use parking_lot::Mutex;

use super::cache::PipelineCache;
use super::device::Device;
use super::matrix::MatrixElement;
use crate::backend::Precision;
use crate::error::{Error, Result};

/// A kernel. Which one a layer takes depends on the layer and the device, never on the size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shader {
    /// By output channels of a tile.
    Conv(Precision, u64),
    /// The same by the matrix unit.
    ConvMatrix(MatrixElement, u64),
    Attention(Precision),
    /// The same by the matrix unit.
    AttentionMatrix(MatrixElement),
    Norm(Precision),
    NormPixel(Precision),
    CacheU8(Precision),
    Load(Precision),
    Store(Precision),
    Blend(Precision),
    Pool(Precision),
    Add(Precision),
    Finalize,
    CopyRows,
}

/// A kernel's code in each precision.
macro_rules! by_precision {
    ($precision:expr, $name:literal) => {
        match $precision {
            Precision::Fp16 => include_bytes!(concat!("../shaders/spirv/", $name, ".fp16.spv")).as_slice(),
            Precision::Bf16 => include_bytes!(concat!("../shaders/spirv/", $name, ".bf16.spv")).as_slice(),
            Precision::Fp32 => include_bytes!(concat!("../shaders/spirv/", $name, ".fp32.spv")).as_slice(),
        }
    };
}

/// The code of a kernel of the matrix unit.
macro_rules! by_element {
    ($element:expr, $name:literal) => {
        match $element {
            MatrixElement::Fp16 => include_bytes!(concat!("../shaders/spirv/", $name, ".fp16.spv")).as_slice(),
            MatrixElement::Bf16 => include_bytes!(concat!("../shaders/spirv/", $name, ".bf16.spv")).as_slice(),
        }
    };
}

impl Shader {
    fn code(self) -> &'static [u8] {
        match self {
            Shader::Conv(precision, 32) => by_precision!(precision, "conv_32"),
            Shader::Conv(precision, 96) => by_precision!(precision, "conv_96"),
            Shader::Conv(precision, _) => by_precision!(precision, "conv_128"),
            Shader::ConvMatrix(element, 32) => by_element!(element, "conv_matrix_32"),
            Shader::ConvMatrix(element, 96) => by_element!(element, "conv_matrix_96"),
            Shader::ConvMatrix(element, _) => by_element!(element, "conv_matrix_128"),
            Shader::Attention(precision) => by_precision!(precision, "attention"),
            Shader::AttentionMatrix(element) => by_element!(element, "attention_matrix"),
            Shader::Norm(precision) => by_precision!(precision, "norm"),
            Shader::NormPixel(precision) => by_precision!(precision, "norm_pixel"),
            Shader::CacheU8(precision) => by_precision!(precision, "cache_u8"),
            Shader::Load(precision) => by_precision!(precision, "load"),
            Shader::Store(precision) => by_precision!(precision, "store"),
            Shader::Blend(precision) => by_precision!(precision, "blend"),
            Shader::Pool(precision) => by_precision!(precision, "pool"),
            Shader::Add(precision) => by_precision!(precision, "add"),
            Shader::Finalize => include_bytes!("../shaders/spirv/finalize.spv"),
            Shader::CopyRows => include_bytes!("../shaders/spirv/copy_rows.spv"),
        }
    }
}

/// A pipeline that takes longer was compiled, and did not come from a cache.
const COMPILED: Duration = Duration::from_millis(10);

/// The kernels of a device, made when a layer first needs them.
pub struct Pipelines {
    made: Mutex<HashMap<Shader, vk::Pipeline>>,
    cache: PipelineCache,
    /// Every kernel has one argument: the address of its parameters.
    pub layout: vk::PipelineLayout,
    device: Arc<Device>,
}

impl Pipelines {
    pub fn new(device: &Arc<Device>) -> Result<Pipelines> {
        let cache = PipelineCache::open(device);
        let stages = vk::ShaderStageFlags::COMPUTE;
        let argument = [vk::PushConstantRange::default().stage_flags(stages).size(size_of::<u64>() as u32)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&argument);
        // SAFETY: the structures live during the call.
        let layout = unsafe { device.raw.create_pipeline_layout(&info, None) };
        let layout = device.check("preparing kernels", layout)?;
        Ok(Pipelines { made: Mutex::default(), cache, layout, device: Arc::clone(device) })
    }

    pub fn get(&self, shader: Shader) -> Result<vk::Pipeline> {
        let mut made = self.made.lock();
        if let Some(known) = made.get(&shader) {
            return Ok(*known);
        }
        let begun = Instant::now();
        let pipeline = self.compile(shader)?;
        if begun.elapsed() > COMPILED {
            self.cache.store();
        }
        made.insert(shader, pipeline);
        Ok(pipeline)
    }

    /// The constants of a kernel that uses the matrix unit, and the size of its subgroups.
    fn matrix_constants(&self, shader: Shader) -> Option<([u32; 5], u32)> {
        let (Shader::ConvMatrix(element, _) | Shader::AttentionMatrix(element)) = shader else { return None };
        let shape = self.device.matrices.of_element(element)?;
        let (subgroups, buffers) = match shader {
            Shader::ConvMatrix(_, tile) => (shape.conv_subgroups(), shape.buffers(tile)),
            _ => (shape.attention_subgroups(), 1),
        };
        Some(([shape.m, shape.n, shape.k, subgroups, buffers], shape.subgroup))
    }

    fn compile(&self, shader: Shader) -> Result<vk::Pipeline> {
        let doing = format!("compiling the kernel {shader:?}");
        let words = util::read_spv(&mut std::io::Cursor::new(shader.code()));
        let words = words.map_err(|why| Error::Internal(format!("{doing}: {why}")))?;
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        let matrix = self.matrix_constants(shader);
        let (constants, subgroup) = matrix.unwrap_or_default();
        let entries: [vk::SpecializationMapEntry; 5] = std::array::from_fn(|i| {
            vk::SpecializationMapEntry::default().constant_id(i as u32).offset(4 * i as u32).size(4)
        });
        let bytes: Vec<u8> = constants.iter().flat_map(|constant| constant.to_ne_bytes()).collect();
        let special = vk::SpecializationInfo::default().map_entries(&entries).data(&bytes);
        let mut size =
            vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default().required_subgroup_size(subgroup);
        let (device, raw) = (&self.device, &self.device.raw);
        // SAFETY: the structures live during the calls, and the module until the pipeline is made.
        let made = unsafe {
            let module = device.check(&doing, raw.create_shader_module(&info, None))?;
            let mut stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(c"main");
            if matrix.is_some() {
                let full = vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS;
                stage = stage.flags(full).specialization_info(&special).push_next(&mut size);
            }
            let info = vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.layout);
            let made = raw.create_compute_pipelines(self.cache.handle(), &[info], None);
            raw.destroy_shader_module(module, None);
            device.check(&doing, made.map_err(|(_, why)| why))?
        };
        Ok(made[0])
    }
}

impl Drop for Pipelines {
    fn drop(&mut self) {
        // SAFETY: the queues that used them are empty, or the device is lost.
        unsafe {
            self.made.get_mut().values().for_each(|pipeline| self.device.raw.destroy_pipeline(*pipeline, None));
            self.device.raw.destroy_pipeline_layout(self.layout, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `BFloat16TypeKHR` and `BFloat16CooperativeMatrixKHR`.
    const BFLOAT16: [u32; 2] = [5116, 5118];
    const COOPERATIVE_MATRIX: u32 = 6022;

    /// What a kernel asks of a device: the operands of `OpCapability`.
    fn capabilities(shader: Shader) -> Vec<u32> {
        let words = util::read_spv(&mut std::io::Cursor::new(shader.code())).unwrap();
        let mut instructions = &words[5..];
        let mut found = Vec::new();
        while let Some(first) = instructions.first() {
            let (length, code) = (first >> 16, first & 0xffff);
            if code == 17 {
                found.push(instructions[1]);
            }
            instructions = &instructions[length as usize..];
        }
        found
    }

    fn kernels_of_matrices(element: MatrixElement) -> Vec<Shader> {
        let convs = [32, 96, 128].map(|tile| Shader::ConvMatrix(element, tile));
        convs.into_iter().chain([Shader::AttentionMatrix(element)]).collect()
    }

    fn other_kernels() -> Vec<Shader> {
        let of = |precision| {
            let convs = [32, 96, 128].map(|tile| Shader::Conv(precision, tile));
            let others = [
                Shader::Attention,
                Shader::Norm,
                Shader::NormPixel,
                Shader::CacheU8,
                Shader::Load,
                Shader::Store,
                Shader::Blend,
                Shader::Pool,
                Shader::Add,
            ];
            convs.into_iter().chain(others.map(|shader| shader(precision)))
        };
        Precision::ALL.into_iter().flat_map(of).chain([Shader::Finalize, Shader::CopyRows]).collect()
    }

    /// Devices without these features get no kernel that needs them.
    #[test]
    fn only_matrices_of_bf16_need_bfloat16() {
        for shader in kernels_of_matrices(MatrixElement::Bf16) {
            let needs = capabilities(shader);
            assert!(BFLOAT16.iter().all(|one| needs.contains(one)), "{shader:?}: {needs:?}");
            assert!(needs.contains(&COOPERATIVE_MATRIX), "{shader:?}: {needs:?}");
        }
        for shader in kernels_of_matrices(MatrixElement::Fp16) {
            let needs = capabilities(shader);
            assert!(!BFLOAT16.iter().any(|one| needs.contains(one)), "{shader:?}: {needs:?}");
            assert!(needs.contains(&COOPERATIVE_MATRIX), "{shader:?}: {needs:?}");
        }
        for shader in other_kernels() {
            let needs = capabilities(shader);
            assert!(!needs.is_empty() && !needs.contains(&COOPERATIVE_MATRIX), "{shader:?}: {needs:?}");
            assert!(!BFLOAT16.iter().any(|one| needs.contains(one)), "{shader:?}: {needs:?}");
        }
    }
}
