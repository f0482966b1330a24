"""The part of the Vulkan API that is used here, as C declarations, numbers and names.

Written from the Vulkan specification, https://registry.khronos.org/vulkan/specs/latest/html/vkspec.html. Handles are
integers, dispatchable ones pointers. Data only.
"""

from __future__ import annotations

STRUCTURE_TYPES = {
    "VkApplicationInfo": 0, "VkInstanceCreateInfo": 1, "VkDeviceQueueCreateInfo": 2, "VkDeviceCreateInfo": 3,
    "VkSubmitInfo": 4, "VkMemoryAllocateInfo": 5, "VkFenceCreateInfo": 8, "VkQueryPoolCreateInfo": 11,
    "VkBufferCreateInfo": 12, "VkShaderModuleCreateInfo": 16, "VkPipelineCacheCreateInfo": 17,
    "VkPipelineShaderStageCreateInfo": 18, "VkComputePipelineCreateInfo": 29, "VkPipelineLayoutCreateInfo": 30,
    "VkDescriptorSetLayoutCreateInfo": 32, "VkDescriptorPoolCreateInfo": 33, "VkDescriptorSetAllocateInfo": 34,
    "VkWriteDescriptorSet": 35, "VkCommandPoolCreateInfo": 39, "VkCommandBufferAllocateInfo": 40,
    "VkCommandBufferBeginInfo": 42, "VkMemoryBarrier": 46,
    "VkPhysicalDeviceVulkan11Features": 49, "VkPhysicalDeviceVulkan12Features": 51,
    "VkPhysicalDeviceVulkan13Features": 53, "VkPhysicalDeviceFeatures2": 1000059000,
    "VkPhysicalDeviceProperties2": 1000059001, "VkPhysicalDeviceMemoryProperties2": 1000059006,
    "VkPhysicalDeviceIDProperties": 1000071004, "VkPhysicalDeviceMaintenance3Properties": 1000168000,
    "VkPhysicalDeviceDriverProperties": 1000196000, "VkPhysicalDeviceFloatControlsProperties": 1000197000,
    "VkPhysicalDeviceMemoryBudgetPropertiesEXT": 1000237000,
    "VkPhysicalDeviceShaderIntegerDotProductFeatures": 1000280000,
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": 1000506000,
}
"""Values of `sType`."""

SUCCESS, NOT_READY, TIMEOUT, INCOMPLETE = 0, 1, 2, 5
OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_LOST = -1, -2, -4

RESULTS = {
    1: "not ready", 2: "time limit", 5: "incomplete", -1: "out of host memory", -2: "out of device memory",
    -3: "initialisation failed", -4: "device lost", -5: "memory map failed", -6: "layer not present",
    -7: "extension not present", -8: "feature not present", -9: "incompatible driver", -10: "too many objects",
    -12: "fragmented pool", -13: "unknown error", -1000069000: "out of pool memory", -1000012000: "invalid shader",
}
"""What `VkResult` values mean."""

VERSION_1_2, VERSION_1_3 = 1 << 22 | 2 << 12, 1 << 22 | 3 << 12
DEVICE_KINDS = {1: "integrated", 2: "discrete", 4: "software"}
QUEUE_GRAPHICS, QUEUE_COMPUTE = 1, 2
MEMORY_DEVICE_LOCAL, MEMORY_HOST_VISIBLE, MEMORY_HOST_COHERENT, MEMORY_HOST_CACHED = 1, 2, 4, 8
USAGE_COPY_SOURCE, USAGE_COPY_TARGET, USAGE_STORAGE = 1, 2, 32
DESCRIPTOR_STORAGE_BUFFER = 7
STAGE_COMPUTE = 32  # of a shader
PIPELINE_TOP, PIPELINE_COMPUTE, PIPELINE_TRANSFER, PIPELINE_BOTTOM, PIPELINE_HOST = 1, 0x800, 0x1000, 0x2000, 0x4000
ACCESS_SHADER_READ, ACCESS_SHADER_WRITE = 0x20, 0x40
ACCESS_TRANSFER_READ, ACCESS_TRANSFER_WRITE = 0x800, 0x1000
ACCESS_HOST_READ, ACCESS_HOST_WRITE = 0x2000, 0x4000
POOL_RESET_COMMAND_BUFFERS = 2
ONE_TIME_SUBMIT = 1
QUERY_TIMESTAMP = 2
RESULTS_OF_64_BITS = 1
WHOLE_SIZE = (1 << 64) - 1

_CORE = """
    robustBufferAccess fullDrawIndexUint32 imageCubeArray independentBlend geometryShader tessellationShader
    sampleRateShading dualSrcBlend logicOp multiDrawIndirect drawIndirectFirstInstance depthClamp depthBiasClamp
    fillModeNonSolid depthBounds wideLines largePoints alphaToOne multiViewport samplerAnisotropy textureCompressionETC2
    textureCompressionASTC_LDR textureCompressionBC occlusionQueryPrecise pipelineStatisticsQuery
    vertexPipelineStoresAndAtomics fragmentStoresAndAtomics shaderTessellationAndGeometryPointSize
    shaderImageGatherExtended shaderStorageImageExtendedFormats shaderStorageImageMultisample
    shaderStorageImageReadWithoutFormat shaderStorageImageWriteWithoutFormat shaderUniformBufferArrayDynamicIndexing
    shaderSampledImageArrayDynamicIndexing shaderStorageBufferArrayDynamicIndexing
    shaderStorageImageArrayDynamicIndexing shaderClipDistance shaderCullDistance shaderFloat64 shaderInt64 shaderInt16
    shaderResourceResidency shaderResourceMinLod sparseBinding sparseResidencyBuffer sparseResidencyImage2D
    sparseResidencyImage3D sparseResidency2Samples sparseResidency4Samples sparseResidency8Samples
    sparseResidency16Samples sparseResidencyAliased variableMultisampleRate inheritedQueries"""
_VULKAN_1_1 = """
    storageBuffer16BitAccess uniformAndStorageBuffer16BitAccess storagePushConstant16 storageInputOutput16 multiview
    multiviewGeometryShader multiviewTessellationShader variablePointersStorageBuffer variablePointers protectedMemory
    samplerYcbcrConversion shaderDrawParameters"""
_VULKAN_1_2 = """
    samplerMirrorClampToEdge drawIndirectCount storageBuffer8BitAccess uniformAndStorageBuffer8BitAccess
    storagePushConstant8 shaderBufferInt64Atomics shaderSharedInt64Atomics shaderFloat16 shaderInt8 descriptorIndexing
    shaderInputAttachmentArrayDynamicIndexing shaderUniformTexelBufferArrayDynamicIndexing
    shaderStorageTexelBufferArrayDynamicIndexing shaderUniformBufferArrayNonUniformIndexing
    shaderSampledImageArrayNonUniformIndexing shaderStorageBufferArrayNonUniformIndexing
    shaderStorageImageArrayNonUniformIndexing shaderInputAttachmentArrayNonUniformIndexing
    shaderUniformTexelBufferArrayNonUniformIndexing shaderStorageTexelBufferArrayNonUniformIndexing
    descriptorBindingUniformBufferUpdateAfterBind descriptorBindingSampledImageUpdateAfterBind
    descriptorBindingStorageImageUpdateAfterBind descriptorBindingStorageBufferUpdateAfterBind
    descriptorBindingUniformTexelBufferUpdateAfterBind descriptorBindingStorageTexelBufferUpdateAfterBind
    descriptorBindingUpdateUnusedWhilePending descriptorBindingPartiallyBound descriptorBindingVariableDescriptorCount
    runtimeDescriptorArray samplerFilterMinmax scalarBlockLayout imagelessFramebuffer uniformBufferStandardLayout
    shaderSubgroupExtendedTypes separateDepthStencilLayouts hostQueryReset timelineSemaphore bufferDeviceAddress
    bufferDeviceAddressCaptureReplay bufferDeviceAddressMultiDevice vulkanMemoryModel vulkanMemoryModelDeviceScope
    vulkanMemoryModelAvailabilityVisibilityChains shaderOutputViewportIndex shaderOutputLayer
    subgroupBroadcastDynamicId"""
_VULKAN_1_3 = """
    robustImageAccess inlineUniformBlock descriptorBindingInlineUniformBlockUpdateAfterBind pipelineCreationCacheControl
    privateData shaderDemoteToHelperInvocation shaderTerminateInvocation subgroupSizeControl computeFullSubgroups
    synchronization2 textureCompressionASTC_HDR shaderZeroInitializeWorkgroupMemory dynamicRendering
    shaderIntegerDotProduct maintenance4"""

FEATURES = {
    "VkPhysicalDeviceFeatures": _CORE.split(),
    "VkPhysicalDeviceVulkan11Features": _VULKAN_1_1.split(),
    "VkPhysicalDeviceVulkan12Features": _VULKAN_1_2.split(),
    "VkPhysicalDeviceVulkan13Features": _VULKAN_1_3.split(),
    "VkPhysicalDeviceShaderIntegerDotProductFeatures": ["shaderIntegerDotProduct"],
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": ["cooperativeMatrix", "cooperativeMatrixRobustBufferAccess"],
}
"""Names of the features in each structure, in its order."""

EXTENSION_FEATURES = {
    "VK_KHR_shader_integer_dot_product": "VkPhysicalDeviceShaderIntegerDotProductFeatures",
    "VK_KHR_cooperative_matrix": "VkPhysicalDeviceCooperativeMatrixFeaturesKHR",
}
"""The structure of an extension's features. From Vulkan 1.3 on the dot product is in that version's own."""

FLOAT_CONTROLS = [f"{control}Float{width}" for control in (
    "shaderSignedZeroInfNanPreserve", "shaderDenormPreserve", "shaderDenormFlushToZero", "shaderRoundingModeRTE",
    "shaderRoundingModeRTZ") for width in (16, 32, 64)]
"""Properties of Vulkan 1.2 that artefacts require like features: how a device's float arithmetic can be told to be."""

_BASE = """
typedef uint32_t VkBool32; typedef uint32_t VkFlags; typedef uint64_t VkDeviceSize; typedef int32_t VkResult;
typedef void *VkInstance; typedef void *VkPhysicalDevice; typedef void *VkDevice; typedef void *VkQueue;
typedef void *VkCommandBuffer;
typedef uint64_t VkBuffer; typedef uint64_t VkDeviceMemory; typedef uint64_t VkFence; typedef uint64_t VkQueryPool;
typedef uint64_t VkShaderModule; typedef uint64_t VkPipelineCache; typedef uint64_t VkPipeline;
typedef uint64_t VkPipelineLayout; typedef uint64_t VkDescriptorSetLayout; typedef uint64_t VkDescriptorPool;
typedef uint64_t VkDescriptorSet; typedef uint64_t VkCommandPool; typedef uint64_t VkSemaphore;
"""

_PROPERTIES = """
typedef struct {
    uint32_t images[5]; uint32_t maxTexelBufferElements; uint32_t maxUniformBufferRange; uint32_t maxStorageBufferRange;
    uint32_t maxPushConstantsSize; uint32_t maxMemoryAllocationCount; uint32_t maxSamplerAllocationCount;
    VkDeviceSize bufferImageGranularity; VkDeviceSize sparseAddressSpaceSize; uint32_t maxBoundDescriptorSets;
    uint32_t maxPerStageDescriptorSamplers; uint32_t maxPerStageDescriptorUniformBuffers;
    uint32_t maxPerStageDescriptorStorageBuffers; uint32_t otherDescriptors[4]; uint32_t setSamplers[3];
    uint32_t maxDescriptorSetStorageBuffers; uint32_t otherSets[4]; uint32_t vertexToFragment[22];
    uint32_t maxComputeSharedMemorySize; uint32_t maxComputeWorkGroupCount[3]; uint32_t maxComputeWorkGroupInvocations;
    uint32_t maxComputeWorkGroupSize[3]; uint32_t precisions[5]; float samplers[2]; uint32_t viewports[3];
    float viewportBoundsRange[2]; uint32_t viewportSubPixelBits; size_t minMemoryMapAlignment;
    VkDeviceSize minTexelBufferOffsetAlignment; VkDeviceSize minUniformBufferOffsetAlignment;
    VkDeviceSize minStorageBufferOffsetAlignment; int32_t texelOffsets[4]; float interpolation[2];
    uint32_t interpolationBits; uint32_t framebuffer[7]; uint32_t colours[7]; VkBool32 timestampComputeAndGraphics;
    float timestampPeriod; uint32_t clips[4]; float points[6]; VkBool32 lines[2];
    VkDeviceSize optimalBufferCopyOffsetAlignment; VkDeviceSize optimalBufferCopyRowPitchAlignment;
    VkDeviceSize nonCoherentAtomSize;
} VkPhysicalDeviceLimits;
typedef struct {
    uint32_t apiVersion; uint32_t driverVersion; uint32_t vendorID; uint32_t deviceID; int32_t deviceType;
    char deviceName[256]; uint8_t pipelineCacheUUID[16]; VkPhysicalDeviceLimits limits; VkBool32 sparse[5];
} VkPhysicalDeviceProperties;
typedef struct { int32_t sType; void *pNext; VkPhysicalDeviceProperties properties; } VkPhysicalDeviceProperties2;
typedef struct {
    int32_t sType; void *pNext; uint8_t deviceUUID[16]; uint8_t driverUUID[16]; uint8_t deviceLUID[8];
    uint32_t deviceNodeMask; VkBool32 deviceLUIDValid;
} VkPhysicalDeviceIDProperties;
typedef struct {
    int32_t sType; void *pNext; int32_t driverID; char driverName[256]; char driverInfo[256]; uint8_t conformance[4];
} VkPhysicalDeviceDriverProperties;
typedef struct {
    int32_t sType; void *pNext; uint32_t maxPerSetDescriptors; VkDeviceSize maxMemoryAllocationSize;
} VkPhysicalDeviceMaintenance3Properties;
typedef struct { VkFlags propertyFlags; uint32_t heapIndex; } VkMemoryType;
typedef struct { VkDeviceSize size; VkFlags flags; } VkMemoryHeap;
typedef struct {
    uint32_t memoryTypeCount; VkMemoryType memoryTypes[32]; uint32_t memoryHeapCount; VkMemoryHeap memoryHeaps[16];
} VkPhysicalDeviceMemoryProperties;
typedef struct {
    int32_t sType; void *pNext; VkPhysicalDeviceMemoryProperties memoryProperties;
} VkPhysicalDeviceMemoryProperties2;
typedef struct {
    int32_t sType; void *pNext; VkDeviceSize heapBudget[16]; VkDeviceSize heapUsage[16];
} VkPhysicalDeviceMemoryBudgetPropertiesEXT;
typedef struct {
    VkFlags queueFlags; uint32_t queueCount; uint32_t timestampValidBits; uint32_t granularity[3];
} VkQueueFamilyProperties;
typedef struct { char extensionName[256]; uint32_t specVersion; } VkExtensionProperties;
"""

_CREATION = """
typedef struct {
    int32_t sType; void *pNext; const char *pApplicationName; uint32_t applicationVersion; const char *pEngineName;
    uint32_t engineVersion; uint32_t apiVersion;
} VkApplicationInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; VkApplicationInfo *pApplicationInfo; uint32_t enabledLayerCount;
    char **ppEnabledLayerNames; uint32_t enabledExtensionCount; char **ppEnabledExtensionNames;
} VkInstanceCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; uint32_t queueFamilyIndex; uint32_t queueCount; float *pQueuePriorities;
} VkDeviceQueueCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; uint32_t queueCreateInfoCount;
    VkDeviceQueueCreateInfo *pQueueCreateInfos; uint32_t enabledLayerCount; char **ppEnabledLayerNames;
    uint32_t enabledExtensionCount; char **ppEnabledExtensionNames; void *pEnabledFeatures;
} VkDeviceCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; VkDeviceSize size; VkFlags usage; int32_t sharingMode;
    uint32_t queueFamilyIndexCount; uint32_t *pQueueFamilyIndices;
} VkBufferCreateInfo;
typedef struct { VkDeviceSize size; VkDeviceSize alignment; uint32_t memoryTypeBits; } VkMemoryRequirements;
typedef struct {
    int32_t sType; void *pNext; VkDeviceSize allocationSize; uint32_t memoryTypeIndex;
} VkMemoryAllocateInfo;
typedef struct { int32_t sType; void *pNext; VkFlags flags; } VkFenceCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; int32_t queryType; uint32_t queryCount; VkFlags pipelineStatistics;
} VkQueryPoolCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; size_t codeSize; uint32_t *pCode;
} VkShaderModuleCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; size_t initialDataSize; void *pInitialData;
} VkPipelineCacheCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; VkFlags stage; VkShaderModule module; const char *pName;
    void *pSpecializationInfo;
} VkPipelineShaderStageCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; VkPipelineShaderStageCreateInfo stage; VkPipelineLayout layout;
    VkPipeline basePipelineHandle; int32_t basePipelineIndex;
} VkComputePipelineCreateInfo;
typedef struct {
    uint32_t binding; int32_t descriptorType; uint32_t descriptorCount; VkFlags stageFlags; void *pImmutableSamplers;
} VkDescriptorSetLayoutBinding;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; uint32_t bindingCount; VkDescriptorSetLayoutBinding *pBindings;
} VkDescriptorSetLayoutCreateInfo;
typedef struct { VkFlags stageFlags; uint32_t offset; uint32_t size; } VkPushConstantRange;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; uint32_t setLayoutCount; VkDescriptorSetLayout *pSetLayouts;
    uint32_t pushConstantRangeCount; VkPushConstantRange *pPushConstantRanges;
} VkPipelineLayoutCreateInfo;
typedef struct { int32_t type; uint32_t descriptorCount; } VkDescriptorPoolSize;
typedef struct {
    int32_t sType; void *pNext; VkFlags flags; uint32_t maxSets; uint32_t poolSizeCount;
    VkDescriptorPoolSize *pPoolSizes;
} VkDescriptorPoolCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkDescriptorPool descriptorPool; uint32_t descriptorSetCount;
    VkDescriptorSetLayout *pSetLayouts;
} VkDescriptorSetAllocateInfo;
typedef struct { VkBuffer buffer; VkDeviceSize offset; VkDeviceSize range; } VkDescriptorBufferInfo;
typedef struct {
    int32_t sType; void *pNext; VkDescriptorSet dstSet; uint32_t dstBinding; uint32_t dstArrayElement;
    uint32_t descriptorCount; int32_t descriptorType; void *pImageInfo; VkDescriptorBufferInfo *pBufferInfo;
    void *pTexelBufferView;
} VkWriteDescriptorSet;
typedef struct { int32_t sType; void *pNext; VkFlags flags; uint32_t queueFamilyIndex; } VkCommandPoolCreateInfo;
typedef struct {
    int32_t sType; void *pNext; VkCommandPool commandPool; int32_t level; uint32_t commandBufferCount;
} VkCommandBufferAllocateInfo;
typedef struct { int32_t sType; void *pNext; VkFlags flags; void *pInheritanceInfo; } VkCommandBufferBeginInfo;
typedef struct { int32_t sType; void *pNext; VkFlags srcAccessMask; VkFlags dstAccessMask; } VkMemoryBarrier;
typedef struct { VkDeviceSize srcOffset; VkDeviceSize dstOffset; VkDeviceSize size; } VkBufferCopy;
typedef struct {
    int32_t sType; void *pNext; uint32_t waitSemaphoreCount; VkSemaphore *pWaitSemaphores; VkFlags *pWaitDstStageMask;
    uint32_t commandBufferCount; VkCommandBuffer *pCommandBuffers; uint32_t signalSemaphoreCount;
    VkSemaphore *pSignalSemaphores;
} VkSubmitInfo;
"""

_FUNCTIONS = """
VkResult vkEnumerateInstanceVersion(uint32_t *version);
VkResult vkCreateInstance(VkInstanceCreateInfo *info, void *allocator, VkInstance *instance);
void vkDestroyInstance(VkInstance instance, void *allocator);
VkResult vkEnumeratePhysicalDevices(VkInstance instance, uint32_t *count, VkPhysicalDevice *devices);
void vkGetPhysicalDeviceProperties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2 *properties);
void vkGetPhysicalDeviceFeatures2(VkPhysicalDevice device, VkPhysicalDeviceFeatures2 *features);
void vkGetPhysicalDeviceMemoryProperties2(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties2 *properties);
void vkGetPhysicalDeviceQueueFamilyProperties(VkPhysicalDevice device, uint32_t *count,
                                              VkQueueFamilyProperties *properties);
VkResult vkEnumerateDeviceExtensionProperties(VkPhysicalDevice device, const char *layer, uint32_t *count,
                                              VkExtensionProperties *properties);
VkResult vkCreateDevice(VkPhysicalDevice gpu, VkDeviceCreateInfo *info, void *allocator, VkDevice *device);
void vkDestroyDevice(VkDevice device, void *allocator);
VkResult vkDeviceWaitIdle(VkDevice device);
void vkGetDeviceQueue(VkDevice device, uint32_t family, uint32_t index, VkQueue *queue);
VkResult vkQueueSubmit(VkQueue queue, uint32_t count, VkSubmitInfo *submits, VkFence fence);
VkResult vkCreateFence(VkDevice device, VkFenceCreateInfo *info, void *allocator, VkFence *fence);
void vkDestroyFence(VkDevice device, VkFence fence, void *allocator);
VkResult vkResetFences(VkDevice device, uint32_t count, VkFence *fences);
VkResult vkWaitForFences(VkDevice device, uint32_t count, VkFence *fences, VkBool32 all, uint64_t nanoseconds);
VkResult vkAllocateMemory(VkDevice device, VkMemoryAllocateInfo *info, void *allocator, VkDeviceMemory *memory);
void vkFreeMemory(VkDevice device, VkDeviceMemory memory, void *allocator);
VkResult vkMapMemory(VkDevice device, VkDeviceMemory memory, VkDeviceSize offset, VkDeviceSize size, VkFlags flags,
                     void **address);
VkResult vkCreateBuffer(VkDevice device, VkBufferCreateInfo *info, void *allocator, VkBuffer *buffer);
void vkDestroyBuffer(VkDevice device, VkBuffer buffer, void *allocator);
void vkGetBufferMemoryRequirements(VkDevice device, VkBuffer buffer, VkMemoryRequirements *requirements);
VkResult vkBindBufferMemory(VkDevice device, VkBuffer buffer, VkDeviceMemory memory, VkDeviceSize offset);
VkResult vkCreateShaderModule(VkDevice device, VkShaderModuleCreateInfo *info, void *allocator, VkShaderModule *module);
void vkDestroyShaderModule(VkDevice device, VkShaderModule module, void *allocator);
VkResult vkCreatePipelineCache(VkDevice device, VkPipelineCacheCreateInfo *info, void *allocator,
                               VkPipelineCache *cache);
void vkDestroyPipelineCache(VkDevice device, VkPipelineCache cache, void *allocator);
VkResult vkGetPipelineCacheData(VkDevice device, VkPipelineCache cache, size_t *size, void *data);
VkResult vkCreateComputePipelines(VkDevice device, VkPipelineCache cache, uint32_t count,
                                  VkComputePipelineCreateInfo *infos, void *allocator, VkPipeline *pipelines);
void vkDestroyPipeline(VkDevice device, VkPipeline pipeline, void *allocator);
VkResult vkCreatePipelineLayout(VkDevice device, VkPipelineLayoutCreateInfo *info, void *allocator,
                                VkPipelineLayout *layout);
void vkDestroyPipelineLayout(VkDevice device, VkPipelineLayout layout, void *allocator);
VkResult vkCreateDescriptorSetLayout(VkDevice device, VkDescriptorSetLayoutCreateInfo *info, void *allocator,
                                     VkDescriptorSetLayout *layout);
void vkDestroyDescriptorSetLayout(VkDevice device, VkDescriptorSetLayout layout, void *allocator);
VkResult vkCreateDescriptorPool(VkDevice device, VkDescriptorPoolCreateInfo *info, void *allocator,
                                VkDescriptorPool *pool);
void vkDestroyDescriptorPool(VkDevice device, VkDescriptorPool pool, void *allocator);
VkResult vkAllocateDescriptorSets(VkDevice device, VkDescriptorSetAllocateInfo *info, VkDescriptorSet *sets);
void vkUpdateDescriptorSets(VkDevice device, uint32_t writes, VkWriteDescriptorSet *write, uint32_t copies, void *copy);
VkResult vkCreateQueryPool(VkDevice device, VkQueryPoolCreateInfo *info, void *allocator, VkQueryPool *pool);
void vkDestroyQueryPool(VkDevice device, VkQueryPool pool, void *allocator);
VkResult vkGetQueryPoolResults(VkDevice device, VkQueryPool pool, uint32_t first, uint32_t count, size_t size,
                               void *data, VkDeviceSize stride, VkFlags flags);
VkResult vkCreateCommandPool(VkDevice device, VkCommandPoolCreateInfo *info, void *allocator, VkCommandPool *pool);
void vkDestroyCommandPool(VkDevice device, VkCommandPool pool, void *allocator);
VkResult vkAllocateCommandBuffers(VkDevice device, VkCommandBufferAllocateInfo *info, VkCommandBuffer *buffers);
void vkFreeCommandBuffers(VkDevice device, VkCommandPool pool, uint32_t count, VkCommandBuffer *buffers);
VkResult vkBeginCommandBuffer(VkCommandBuffer commands, VkCommandBufferBeginInfo *info);
VkResult vkEndCommandBuffer(VkCommandBuffer commands);
void vkCmdBindPipeline(VkCommandBuffer commands, int32_t point, VkPipeline pipeline);
void vkCmdBindDescriptorSets(VkCommandBuffer commands, int32_t point, VkPipelineLayout layout, uint32_t first,
                             uint32_t count, VkDescriptorSet *sets, uint32_t offsets, uint32_t *offset);
void vkCmdPushConstants(VkCommandBuffer commands, VkPipelineLayout layout, VkFlags stages, uint32_t offset,
                        uint32_t size, void *values);
void vkCmdDispatch(VkCommandBuffer commands, uint32_t x, uint32_t y, uint32_t z);
void vkCmdPipelineBarrier(VkCommandBuffer commands, VkFlags before, VkFlags after, VkFlags flags, uint32_t memory,
                          VkMemoryBarrier *barriers, uint32_t buffers, void *buffer, uint32_t images, void *image);
void vkCmdCopyBuffer(VkCommandBuffer commands, VkBuffer source, VkBuffer target, uint32_t count, VkBufferCopy *regions);
void vkCmdFillBuffer(VkCommandBuffer commands, VkBuffer buffer, VkDeviceSize offset, VkDeviceSize size, uint32_t word);
void vkCmdResetQueryPool(VkCommandBuffer commands, VkQueryPool pool, uint32_t first, uint32_t count);
void vkCmdWriteTimestamp(VkCommandBuffer commands, VkFlags stage, VkQueryPool pool, uint32_t query);
"""


def declarations() -> str:
    """All of it as C."""
    features = []
    for name, members in FEATURES.items():
        head = "" if name == "VkPhysicalDeviceFeatures" else "int32_t sType; void *pNext; "
        features.append(f"typedef struct {{ {head}{' '.join(f'VkBool32 {m};' for m in members)} }} {name};")
    features.append("typedef struct { int32_t sType; void *pNext; int32_t denormBehaviorIndependence; "
                    f"int32_t roundingModeIndependence; {' '.join(f'VkBool32 {m};' for m in FLOAT_CONTROLS)} }} "
                    "VkPhysicalDeviceFloatControlsProperties;")
    features.append("typedef struct { int32_t sType; void *pNext; VkPhysicalDeviceFeatures features; } "
                    "VkPhysicalDeviceFeatures2;")
    return _BASE + "\n".join(features) + _PROPERTIES + _CREATION + _FUNCTIONS
