// Logarithms and angles to the last bits of fp32. Those of a driver may be some 1e-6 off, llvmpipe's are: of 512 wedges
// that is a ten-thousandth of one. Polynomials: Cephes' logf and atanf (S. Moshier, netlib.org/cephes).
//
// REALS, INTS   float and int, or vectors of as many

// ln(x) of x > 0.
REALS exact_log(REALS x) {
    INTS bits = floatBitsToInt(x), power = (bits - 0x3f3504f3) >> 23;  // x is 2^power times what is in [sqrt(1/2), sqrt(2))
    REALS e = REALS(power), f = intBitsToFloat(bits - (power << 23)) - 1.0, z = f * f;
    REALS sum = 7.0376836292e-2 * f - 1.1514610310e-1;
    sum = sum * f + 1.1676998740e-1;
    sum = sum * f - 1.2420140846e-1;
    sum = sum * f + 1.4249322787e-1;
    sum = sum * f - 1.6668057665e-1;
    sum = sum * f + 2.0000714765e-1;
    sum = sum * f - 2.4999993993e-1;
    sum = sum * f + 3.3333331174e-1;
    sum = sum * f * z - 2.12194440e-4 * e - 0.5 * z;
    return f + sum + 0.693359375 * e;
}

// The angle from +x towards +y in turns, -1/2 to 1/2; 0 of (0, 0).
REALS turns(REALS y, REALS x) {
    REALS far = max(abs(x), abs(y)), near = min(abs(x), abs(y));
    REALS steep = 1.0 - step(abs(y), abs(x)), half_way = 1.0 - step(near, 0.41421356 * far);  // beyond 1/8, beyond 1/16
    REALS t = (near - half_way * far) / max(far + half_way * near, REALS(1e-30)), z = t * t;
    REALS sum = 8.05374449538e-2 * z - 1.38776856032e-1;
    sum = sum * z + 1.99777106478e-1;
    sum = sum * z - 3.33329491539e-1;
    REALS turn = half_way * 0.125 + (sum * z * t + t) * 0.15915494309189535;
    turn = mix(turn, 0.25 - turn, steep);
    turn = mix(turn, 0.5 - turn, 1.0 - step(REALS(0.0), x));
    return mix(turn, -turn, 1.0 - step(REALS(0.0), y));
}
