// What the samplers share: one thread makes a sample of all channels of an image, an image is a layer of the texture.
#pragma once
#include "block.cuh"
#include "elements.cuh"

// Channels of a sample into planes that are `plane` elements apart. A texture's 1 is 255 counts.
__device__ __forceinline__ void store_planes(element* target, unsigned long long plane, int channels, float4 sample) {
    target[0] = to_element(sample.x * TO_STORED);
    if (channels > 1) target[plane] = to_element(sample.y * TO_STORED);
    if (channels > 2) target[2 * plane] = to_element(sample.z * TO_STORED);
    if (channels > 3) target[3 * plane] = to_element(sample.w * TO_STORED);
}
