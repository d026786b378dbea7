// Where a pixel of a foveated picture reads the pyramid it is made of.
// CHANNELS; TO_STORED: what a texture's 1 is in the tensor

layout(std430, binding = 1) readonly buffer Fixations { vec2 b_fixations[]; };  // one an image of the whole batch
uniform int u_first_image;  // of the texture
uniform vec2 u_pixel;       // 1 / (width, height)
uniform vec2 u_box;         // (width, height) / longer side / e0
uniform float u_bias;

// From the fixation to the pixel, in units of e0.
vec2 away_from(vec2 fixation, vec2 place) { return (place - fixation) * u_box; }

float level_at(vec2 away) { return max(log2(1.0 + sqrt(dot(away, away))) + u_bias, 0.0); }
