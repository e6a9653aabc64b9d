// Compiles the matrix kernels with a driver that needs no card. The driver prints what it made.
// `offline.sh` says how it is built and run.
//   offline SUBGROUP SHARED_BYTES SHADER.spv THREADS...     a shader, and the threads of its workgroup
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vulkan/vulkan.h>

// Headers of Debian 12 are older than the extension.
#ifndef VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME
#define VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME "VK_KHR_cooperative_matrix"
#define VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR ((VkStructureType)1000506000)
typedef struct {
    VkStructureType sType;
    void *pNext;
    VkBool32 cooperativeMatrix;
    VkBool32 cooperativeMatrixRobustBufferAccess;
} VkPhysicalDeviceCooperativeMatrixFeaturesKHR;
#endif

#define CHECK(call)                                                                \
    do {                                                                           \
        VkResult result = (call);                                                  \
        if (result != VK_SUCCESS) {                                                \
            fprintf(stderr, "%s: VkResult %d\n", #call, result);                   \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static uint32_t *read_words(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        exit(1);
    }
    *bytes = (size_t)ftell(file);
    rewind(file);
    uint32_t *words = malloc(*bytes);
    if (words == NULL || fread(words, 1, *bytes, file) != *bytes) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    fclose(file);
    return words;
}

static VkDevice open_device(VkPhysicalDevice physical) {
    VkPhysicalDeviceCooperativeMatrixFeaturesKHR matrix = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR, .cooperativeMatrix = VK_TRUE};
    VkPhysicalDeviceVulkan13Features v13 = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES, .pNext = &matrix,
        .subgroupSizeControl = VK_TRUE, .computeFullSubgroups = VK_TRUE, .maintenance4 = VK_TRUE};
    VkPhysicalDeviceVulkan12Features v12 = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, .pNext = &v13,
        .shaderFloat16 = VK_TRUE, .bufferDeviceAddress = VK_TRUE, .scalarBlockLayout = VK_TRUE, .vulkanMemoryModel = VK_TRUE,
        .storageBuffer8BitAccess = VK_TRUE};
    VkPhysicalDeviceVulkan11Features v11 = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, .pNext = &v12,
        .storageBuffer16BitAccess = VK_TRUE};
    VkPhysicalDeviceFeatures base = {.shaderInt64 = VK_TRUE};
    const float priority = 1;
    VkDeviceQueueCreateInfo queue = {.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueCount = 1, .pQueuePriorities = &priority};
    const char *extension = VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME;
    VkDeviceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .pNext = &v11, .queueCreateInfoCount = 1,
        .pQueueCreateInfos = &queue, .enabledExtensionCount = 1, .ppEnabledExtensionNames = &extension, .pEnabledFeatures = &base};
    VkDevice device;
    CHECK(vkCreateDevice(physical, &info, NULL, &device));
    return device;
}

int main(int count, char **arguments) {
    if (count < 5 || count % 2 == 0) {
        fprintf(stderr, "usage: offline SUBGROUP SHARED_BYTES SHADER.spv THREADS...\n");
        return 2;
    }
    const uint32_t subgroup = (uint32_t)atoi(arguments[1]), shared = (uint32_t)atoi(arguments[2]);
    VkApplicationInfo application = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_3};
    VkInstanceCreateInfo creation = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &application};
    VkInstance instance;
    CHECK(vkCreateInstance(&creation, NULL, &instance));
    uint32_t devices = 1;
    VkPhysicalDevice physical;
    VkResult listed = vkEnumeratePhysicalDevices(instance, &devices, &physical);
    if ((listed != VK_SUCCESS && listed != VK_INCOMPLETE) || devices == 0) {
        fprintf(stderr, "the driver lists no device\n");
        return 1;
    }
    VkPhysicalDeviceProperties properties;
    vkGetPhysicalDeviceProperties(physical, &properties);
    printf("%s\n", properties.deviceName);
    VkDevice device = open_device(physical);
    VkPushConstantRange argument = {.stageFlags = VK_SHADER_STAGE_COMPUTE_BIT, .size = 8};
    VkPipelineLayoutCreateInfo layouts = {.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO, .pushConstantRangeCount = 1,
        .pPushConstantRanges = &argument};
    VkPipelineLayout layout;
    CHECK(vkCreatePipelineLayout(device, &layouts, NULL, &layout));
    for (int i = 3; i < count; i += 2) {
        size_t bytes;
        const uint32_t *words = read_words(arguments[i], &bytes);
        // As `driver/matrix.rs` chooses them: M, N, K, subgroups, buffers.
        const uint32_t constants[5] = {16, 16, 16, (uint32_t)atoi(arguments[i + 1]) / subgroup, shared > 35 * 1024 ? 2 : 1};
        VkSpecializationMapEntry entries[5];
        for (uint32_t c = 0; c < 5; ++c) entries[c] = (VkSpecializationMapEntry){c, 4 * c, 4};
        VkSpecializationInfo special = {5, entries, sizeof constants, constants};
        VkShaderModuleCreateInfo code = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, .codeSize = bytes, .pCode = words};
        VkShaderModule module;
        CHECK(vkCreateShaderModule(device, &code, NULL, &module));
        VkPipelineShaderStageRequiredSubgroupSizeCreateInfo size = {
            .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO, .requiredSubgroupSize = subgroup};
        VkComputePipelineCreateInfo pipeline = {.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
            .stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO, .pNext = &size,
                .flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT, .stage = VK_SHADER_STAGE_COMPUTE_BIT,
                .module = module, .pName = "main", .pSpecializationInfo = &special},
            .layout = layout};
        printf("== %s\n", arguments[i]);
        fflush(stdout);
        VkPipeline made;
        CHECK(vkCreateComputePipelines(device, VK_NULL_HANDLE, 1, &pipeline, NULL, &made));
    }
    return 0;
}
