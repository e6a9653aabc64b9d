//! `VK_KHR_shader_bfloat16`, which ash 0.38 does not know yet: as `vulkan_core.h` declares it.

use std::ffi::{CStr, c_void};

use ash::vk;

pub const NAME: &CStr = c"VK_KHR_shader_bfloat16";

/// `VK_COMPONENT_TYPE_BFLOAT16_KHR`
pub const COMPONENT: vk::ComponentTypeKHR = vk::ComponentTypeKHR::from_raw(1_000_141_000);

/// `VkPhysicalDeviceShaderBfloat16FeaturesKHR`
#[repr(C)]
pub struct Bfloat16Features {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    has_type: vk::Bool32,
    has_dot_product: vk::Bool32,
    has_matrices: vk::Bool32,
}

// SAFETY: the specification lets the structure extend both. It begins with its type and a pointer to the next one.
unsafe impl vk::ExtendsPhysicalDeviceFeatures2 for Bfloat16Features {}
// SAFETY: as above.
unsafe impl vk::ExtendsDeviceCreateInfo for Bfloat16Features {}

// Another structure of three features.
const _: () = assert!(size_of::<Bfloat16Features>() == size_of::<vk::PhysicalDeviceVulkanMemoryModelFeatures>());

impl Default for Bfloat16Features {
    fn default() -> Bfloat16Features {
        Bfloat16Features {
            s_type: vk::StructureType::from_raw(1_000_141_000),
            p_next: std::ptr::null_mut(),
            has_type: vk::FALSE,
            has_dot_product: vk::FALSE,
            has_matrices: vk::FALSE,
        }
    }
}

impl Bfloat16Features {
    /// What kernels need: the type, and matrices of it.
    pub fn needed() -> Bfloat16Features {
        Bfloat16Features { has_type: vk::TRUE, has_matrices: vk::TRUE, ..Bfloat16Features::default() }
    }

    pub fn has_needed(&self) -> bool {
        self.has_type == vk::TRUE && self.has_matrices == vk::TRUE
    }
}
