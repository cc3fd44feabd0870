package org.ondevice.core

/** What a port is bound by: its role, and its name where a method may have several of that role. */
internal data class Key(val role: Role, val name: String = "") {
    companion object {
        fun of(port: Port) = Key(port.role, if (port.role.isNamed) port.name else "")
    }
}

/** Tensors of the state by name. */
internal typealias State = Map<String, Tensor>

/** What a training step came to, and the state after it; null where the step was left out, because the loss scale is too large. */
internal class Stepped(val result: StepResult, val state: State?)

/**
 * How steps come out of calls of a program's methods. The state is the caller's: a step that fails has changed nothing.
 */
internal interface ProgramCalls {
    /** One training step; [scalars] are its seed, learning rate, counters and constants. [weigh] is as in [Session.step]. */
    fun step(state: State, batch: Batch, scalars: Map<Key, Tensor>, weigh: Weigh?): Stepped

    /** Losses of the rows of a batch of [Manifest.evalBatchSize] rows. */
    fun evaluate(state: State, batch: Batch, scalars: Map<Key, Tensor>): RowLosses

    /** Columns of the ids that [nextToken] takes. */
    val nextTokenColumns: Int

    /** Logits [vocabulary] of the token behind the first [length] of [ids]. */
    fun nextToken(state: State, ids: LongArray, length: Int): FloatArray

    /** A text that begins now; only where the program can say which token comes next. */
    fun reader(state: State, padId: Int): TokenReader = WholeRowReader(nextTokenColumns, padId) { ids, length -> nextToken(state, ids, length) }
}

/** Calls the methods of a program with inputs bound by role, and holds what comes out against the manifest. */
internal class Methods(private val spec: ProgramSpec, private val program: Program) {
    /** Outputs of [name] by role; [input] gives each port's tensor. [layer] is as in [Program.execute]. */
    fun call(name: String, layer: Int = 0, input: (Port) -> Tensor): Map<Key, Tensor> {
        val method = spec.methods[name] ?: throw artifactError("the program has no method $name", received = spec.methods.keys)
        val outputs = program.execute(name, method.inputs.map(input), layer)
        if (outputs.size != method.outputs.size) {
            throw artifactError("$name gave another number of tensors", method.outputs.size, outputs.size, "export the artifact again")
        }
        return method.outputs.zip(outputs).associate { (port, tensor) ->
            if (tensor.dtype != port.dtype || tensor.count != port.count) {
                throw artifactError("$name gave another tensor than the manifest says", port, tensor, "export the artifact again")
            }
            Key.of(port) to tensor
        }
    }
}

internal fun scalar(value: Long) = Tensor.of(longArrayOf(value), 1)

internal fun scalar(value: Double) = Tensor.of(floatArrayOf(value.toFloat()), 1)

internal fun vector(values: FloatArray) = Tensor.of(values, values.size.toLong())
