#version 430
// Rows of small elements out of rows that are longer, one behind the other without a gap: an invocation makes 64 bits of
// them, and belongs to the row that its first element is in.
//
// PER_WORD   elements in a word, 2 or 4; rows are at least two words long
#include "pairs.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 1) uniform usamplerBuffer b_source;  // words
layout(std430, binding = 0) writeonly buffer Target { TWO_WORDS b_target[]; };

uniform int u_width;         // of a row
uniform int u_source_first;  // word that the first row begins with
uniform int u_source_words;  // from a source row to the next

const int BITS = 32 / PER_WORD, LOG2 = PER_WORD / 2;

uint word_at(int row, int x) {
    int over = int(x >= u_width);
    x -= over * u_width;
    row += over;
    int at = u_source_first + row * u_source_words, shift = (x & (PER_WORD - 1)) * BITS, left = u_width - x;
    uint low = texelFetch(b_source, at + (x >> LOG2)).x, high = texelFetch(b_source, at + (x >> LOG2) + 1).x;
    uint word = (low >> shift) | (shift > 0 ? high << (32 - shift) : 0u);
    uint below = texelFetch(b_source, at + u_source_words).x;
    int kept = min(left, PER_WORD - 1) * BITS;
    return left >= PER_WORD ? word : (word & ((1u << kept) - 1u)) | (below << kept);
}

void main() {
    const uint GROUP = 2u * PER_WORD;
    int row = int(gl_GlobalInvocationID.y);
    uint begin = uint(row) * uint(u_width), group = (begin + GROUP - 1u) / GROUP + gl_GlobalInvocationID.x;
    int x = int(group * GROUP - begin);
    if (x < u_width) b_target[group] = as_words(word_at(row, x), word_at(row, x + PER_WORD));
}
