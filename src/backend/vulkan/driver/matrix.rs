//! The matrix unit of a device, as kernels use it: products of f16 or bf16 with f32 sums.

use ash::{khr, vk};

use super::bfloat16;
use super::instance::{Instance, PhysicalDevice};
use crate::backend::Precision;
use crate::error::Result;

/// Threads of a workgroup, pixels of a tile, and its output channels: those of `shaders/conv_matrix.comp`.
const THREADS: u32 = 128;
const PIXELS: u32 = 128;
const TILE_CHANNELS: [u32; 3] = [32, 96, 128];
/// Rows of matrices of a subgroup, input channels of a step, and output channels that go through memory at a time.
const ROWS: u32 = 4;
const K_BLOCK: u32 = 32;
const CHUNK: u32 = 32;
// Of `shaders/attention_matrix.comp`.
const ATTENTION_THREADS: u32 = 256;
const QUERIES: u32 = 64;
const KEYS: u32 = 64;
/// Keys whose values are multiplied at a time.
const VALUE_KEYS: u32 = 16;
const RESULT_CHANNELS: u32 = 512;
/// Bytes of shared memory for a pixel of input, or the weights of an output channel.
const PITCH_BYTES: u32 = 2 * (K_BLOCK + 8);
/// Pixels of a tile with its halo.
const PATCH_PIXELS: u32 = 10 * 18;
/// Bytes of shared memory that a workgroup needs at least. Attention takes 27 KiB, convolutions 24 with one buffer.
const LEAST_SHARED_MEMORY: u32 = 32 << 10;
/// Shapes that kernels may take, the best first.
const SHAPES: [(u32, u32, u32); 6] = [(16, 16, 16), (16, 8, 16), (8, 16, 16), (8, 8, 16), (16, 8, 8), (8, 8, 8)];
/// With a choice, every vendor's matrix unit works with subgroups of this size.
const SUBGROUP: u32 = 32;

/// What a matrix unit multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatrixElement {
    Fp16,
    Bf16,
}

impl MatrixElement {
    fn component(self) -> vk::ComponentTypeKHR {
        match self {
            MatrixElement::Fp16 => vk::ComponentTypeKHR::FLOAT16,
            MatrixElement::Bf16 => bfloat16::COMPONENT,
        }
    }
}

/// How kernels use the matrix unit of a device, in each precision in which they do.
#[derive(Debug, Clone, Copy, Default)]
pub struct Matrices {
    fp16: Option<MatrixShape>,
    bf16: Option<MatrixShape>,
}

impl Matrices {
    /// Those of a device that has the extension for them.
    pub fn of(instance: &Instance, device: &PhysicalDevice) -> Result<Matrices> {
        let mut sizes = vk::PhysicalDeviceSubgroupSizeControlProperties::default();
        let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut sizes);
        // SAFETY: the device is of this instance.
        unsafe { instance.raw.get_physical_device_properties2(device.handle, &mut all) };
        let shared_memory = all.properties.limits.max_compute_shared_memory_size;
        let subgroup = SUBGROUP.clamp(sizes.min_subgroup_size, sizes.max_subgroup_size);
        let most_threads = subgroup.saturating_mul(sizes.max_compute_workgroup_subgroups);
        if !sizes.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE)
            || most_threads < THREADS.max(ATTENTION_THREADS)
        {
            // Kernels of matrices ask for a size of subgroups.
            return Ok(Matrices::default());
        }
        let unit = MatrixUnit { subgroup, shared_memory };
        let matrices = khr::cooperative_matrix::Instance::new(&instance.entry, &instance.raw);
        // SAFETY: as above, and the device has the extension.
        let known = unsafe { matrices.get_physical_device_cooperative_matrix_properties(device.handle) };
        let known = super::error::check("asking for matrices", known)?;
        let has_bf16 = device.features.bfloat16_matrices;
        Ok(Matrices {
            fp16: unit.shape(MatrixElement::Fp16, &known),
            bf16: unit.shape(MatrixElement::Bf16, &known).filter(|_| has_bf16),
        })
    }

    pub fn of_element(&self, element: MatrixElement) -> Option<MatrixShape> {
        match element {
            MatrixElement::Fp16 => self.fp16,
            MatrixElement::Bf16 => self.bf16,
        }
    }

    /// `None` where kernels use no matrix unit.
    pub fn shape(&self, precision: Precision) -> Option<MatrixShape> {
        match precision {
            Precision::Fp16 => self.of_element(MatrixElement::Fp16),
            Precision::Bf16 => self.of_element(MatrixElement::Bf16),
            Precision::Fp32 => None,
        }
    }

    pub fn is_none(&self) -> bool {
        self.fp16.is_none() && self.bf16.is_none()
    }
}

/// What is the same for all shapes of a device.
struct MatrixUnit {
    subgroup: u32,
    shared_memory: u32,
}

impl MatrixUnit {
    /// The best shape for an element of those that are known. `None` if kernels can use none.
    fn shape(&self, element: MatrixElement, known: &[vk::CooperativeMatrixPropertiesKHR]) -> Option<MatrixShape> {
        let (operand, sum) = (element.component(), vk::ComponentTypeKHR::FLOAT32);
        let is_known = |(m, n, k): &(u32, u32, u32)| {
            known.iter().any(|one| {
                (one.m_size, one.n_size, one.k_size) == (*m, *n, *k)
                    && (one.a_type, one.b_type, one.c_type, one.result_type) == (operand, operand, sum, sum)
                    && one.scope == vk::ScopeKHR::SUBGROUP
            })
        };
        let MatrixUnit { subgroup, shared_memory } = *self;
        let mut shapes = SHAPES.into_iter().filter(is_known);
        shapes.find_map(|(m, n, k)| {
            Some(MatrixShape { element, m, n, k, subgroup, shared_memory }).filter(MatrixShape::fits)
        })
    }
}

/// Rows of pixels, output channels and input channels of a product; and the size of the subgroups that compute it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    pub element: MatrixElement,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub subgroup: u32,
    /// Bytes of shared memory that a workgroup may have.
    pub shared_memory: u32,
}

impl MatrixShape {
    /// Subgroups of a convolution's workgroup.
    pub fn conv_subgroups(&self) -> u32 {
        THREADS / self.subgroup
    }

    /// Subgroups of a workgroup of attention.
    pub fn attention_subgroups(&self) -> u32 {
        ATTENTION_THREADS / self.subgroup
    }

    /// Tiles of scores of a subgroup of attention, which are side by side.
    fn score_tiles(&self) -> u32 {
        QUERIES / self.m * (KEYS / self.n) / self.attention_subgroups()
    }

    /// Buffers for the weights of a step: two, where there is room, so that one is filled while the other is read.
    pub fn buffers(&self, tile_channels: u64) -> u32 {
        let bytes = |buffers: u32| (PATCH_PIXELS + buffers * tile_channels as u32) * PITCH_BYTES;
        if bytes(2) <= self.shared_memory { 2 } else { 1 }
    }

    /// Whether every tile is divided evenly among subgroups, and shared memory suffices.
    fn fits(&self) -> bool {
        let row_groups = PIXELS / self.m / ROWS;
        let column_groups = self.conv_subgroups() / row_groups;
        self.shared_memory >= LEAST_SHARED_MEMORY
            && column_groups > 0
            && self.conv_subgroups().is_multiple_of(row_groups)
            && K_BLOCK.is_multiple_of(self.k)
            && CHUNK.is_multiple_of(self.n)
            && TILE_CHANNELS.iter().all(|channels| (channels / self.n).is_multiple_of(column_groups))
            && (QUERIES / self.m * (KEYS / self.n)).is_multiple_of(self.attention_subgroups())
            && self.score_tiles() > 0
            && (KEYS / self.n).is_multiple_of(self.score_tiles())
            && (RESULT_CHANNELS / self.n).is_multiple_of(self.attention_subgroups())
            && VALUE_KEYS.is_multiple_of(self.k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape((m, n, k): (u32, u32, u32), subgroup: u32, shared_memory: u32) -> MatrixShape {
        MatrixShape { element: MatrixElement::Fp16, m, n, k, subgroup, shared_memory }
    }

    fn known(
        operand: vk::ComponentTypeKHR,
        sum: vk::ComponentTypeKHR,
        side: u32,
    ) -> vk::CooperativeMatrixPropertiesKHR<'static> {
        vk::CooperativeMatrixPropertiesKHR::default()
            .m_size(side)
            .n_size(side)
            .k_size(side)
            .a_type(operand)
            .b_type(operand)
            .c_type(sum)
            .result_type(sum)
            .scope(vk::ScopeKHR::SUBGROUP)
    }

    #[test]
    fn each_element_has_the_shapes_that_are_known_of_it() {
        let (f16, f32) = (vk::ComponentTypeKHR::FLOAT16, vk::ComponentTypeKHR::FLOAT32);
        let unit = MatrixUnit { subgroup: 32, shared_memory: 48 << 10 };
        let side = |element, known: &[_]| unit.shape(element, known).map(|shape| (shape.element, shape.m));
        let (fp16, bf16) = (MatrixElement::Fp16, MatrixElement::Bf16);
        let both = [known(f16, f32, 16), known(bfloat16::COMPONENT, f32, 16)];
        assert_eq!(side(fp16, &both), Some((fp16, 16)));
        assert_eq!(side(bf16, &both), Some((bf16, 16)));
        assert_eq!((side(fp16, &both[..1]), side(bf16, &both[..1])), (Some((fp16, 16)), None));
        assert_eq!(side(bf16, &[known(bfloat16::COMPONENT, bfloat16::COMPONENT, 16)]), None);
    }

    #[test]
    fn published_shapes_fit() {
        let fits = |(m, n, k), subgroup| shape((m, n, k), subgroup, 32 << 10).fits();
        assert!(fits((16, 16, 16), 32), "NVIDIA, AMD");
        assert!(fits((8, 16, 16), 16), "Intel");
        assert!(fits((8, 8, 8), 8), "lavapipe");
        assert!(!fits((16, 16, 16), 8) && !fits((32, 32, 16), 32));
        assert!(!shape((16, 16, 16), 32, 16 << 10).fits());
    }

    #[test]
    fn weights_have_two_buffers_where_there_is_room() {
        let of = |shared_memory| shape((8, 8, 8), 8, shared_memory);
        assert_eq!([32, 96, 128].map(|tile| of(32 << 10).buffers(tile)), [2, 2, 1]);
        assert_eq!([32, 96, 128].map(|tile| of(48 << 10).buffers(tile)), [2, 2, 2]);
    }
}
