// Invocations of a subgroup read one another's values without shared memory and without barriers. Extensions: include
// this first.
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

// Where subgroups are full they follow one another in this order; gl_LocalInvocationIndex may run otherwise.
#define LANE int(gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID)
// Whether so many lanes from a multiple on are in one subgroup of a workgroup of so many threads, all of them at work.
#define LANES_MEET(count_, threads_) \
    (gl_SubgroupSize >= uint(count_) && gl_NumSubgroups * gl_SubgroupSize == uint(threads_))
// Before lanes read one another behind branches that not all of them took: where those end is for the compiler to say.
#define LANES_TOGETHER subgroupBarrier()
#define OTHER_LANE(value_, mask_) subgroupShuffleXor(value_, mask_)
