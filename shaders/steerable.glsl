// Freeman and Adelson's second derivative of a Gaussian and its Hilbert transform (G2 and H2), 9 taps 0.67 apart, as
// products of four one-dimensional filters. Numbers are those of gpu_lod/oriented_energy.py.

// By distance from the centre: the Gaussian, the kernel of Gxx with its mean taken away, and that of Hxxy along x, which is a
// mixture of these two (even); x times the Gaussian, and the kernel of Hxxx (odd).
const vec3 EVEN[5] = vec3[](
    vec3(1.0, -0.9210981713, -0.7348040000), vec3(0.6383299285, -0.0599743084, -0.1888050986),
    vec3(0.1660278058, 0.3963871341, 0.1695630026), vec3(0.0175957128, 0.1147801791, 0.0565950933),
    vec3(0.0007598420, 0.0093560809, 0.0047790897));
const vec2 ODD[5] = vec2[](
    vec2(0.0), vec2(0.4276810521, -0.7550229117), vec2(0.2224772597, -0.0997399372),
    vec2(0.0353673826, 0.0617799491), vec2(0.0020363766, 0.0098152849));

const float CROSS = 1.8426;  // of Gxy
