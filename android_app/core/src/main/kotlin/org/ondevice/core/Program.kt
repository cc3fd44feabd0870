package org.ondevice.core

import java.io.Closeable

/**
 * The exported program. On the phone it is `org.pytorch.executorch.Module`; one [execute] is one whole step, or one
 * function of a block.
 *
 * Calls come from one thread. Inputs have the dtypes and shapes of the manifest's ports, in their order;
 * so must the outputs. An implementation loads a method at its first call. Every loaded method of an XNNPACK
 * program keeps its own packed copy of the weights, so one that needs memory drops `evaluate*` before it
 * loads `train_step*` and the other way round; nothing is lost, for the state is an input and an output.
 */
interface Program : Closeable {
    /**
     * Run one method.
     *
     * @param layer whose file [method] is taken from, where every layer has its own ([ProgramMethod.program]).
     * @throws OndeviceException when the runtime refuses: [ErrorKind.ARTIFACT], with the runtime's own words.
     */
    fun execute(method: String, inputs: List<Tensor>, layer: Int = 0): List<Tensor>

    /** Give back what loaded methods hold; the next [execute] loads its method again. */
    fun unload() {}
}
