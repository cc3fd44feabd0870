package org.ondevice.core

/** A program one of whose methods is a whole training step. */
internal class WholeSteps(private val manifest: Manifest, program: Program) : ProgramCalls {
    private val spec = manifest.spec
    private val methods = Methods(spec, program)

    override fun step(state: State, batch: Batch, scalars: Map<Key, Tensor>, weigh: Weigh?): Stepped {
        if (weigh != null) {
            throw artifactError(
                "this model cannot learn from judged answers", "a program of mesp", manifest.method.name, "export it again with --method mesp",
            )
        }
        val outputs = call(method(TRAIN_STEP, manifest.batchSize, batch), tokens(batch.repeated(spec.batchCopies)) + scalars, state)
        val next = outputs.filterKeys { it.role == Role.STATE }.mapKeys { it.key.name }
        val losses = outputs.getValue(Key(Role.LOSSES)).floats()
        val gradients = outputs[Key(Role.PROJECTED_GRADIENTS)]?.floats() ?: FloatArray(0)
        return Stepped(StepResult(Means.mean(losses).toDouble(), losses, gradients), state + next)
    }

    override fun evaluate(state: State, batch: Batch, scalars: Map<Key, Tensor>): RowLosses {
        val outputs = call(method(spec.evaluatesWith, manifest.evalBatchSize, batch), tokens(batch) + scalars, state)
        val tokens = outputs.getValue(Key(Role.TOKENS)).floats()
        return RowLosses(outputs.getValue(Key(Role.NLL_SUM)).floats(), LongArray(tokens.size) { tokens[it].toLong() })
    }

    override val nextTokenColumns: Int
        get() = spec.methods.getValue(NEXT_TOKEN).inputs.first { it.role == Role.IDS }.shape.last()

    override fun nextToken(state: State, ids: LongArray, length: Int): FloatArray {
        val given = mapOf(Key(Role.IDS) to Tensor.of(ids, 1, ids.size.toLong()), Key(Role.LENGTH) to scalar(length.toLong()))
        return call(NEXT_TOKEN, given, state).getValue(Key(Role.LOGITS)).floats()
    }

    private fun method(kind: String, rows: Int, batch: Batch): String {
        if (batch.rows != rows) throw artifactError("the program's $kind takes $rows rows", rows, batch.rows)
        return manifest.methodFor(kind, batch.lengthTokens)
    }

    private fun tokens(batch: Batch): Map<Key, Tensor> = mapOf(
        Key(Role.IDS) to Tensor.of(batch.ids, batch.rows.toLong(), batch.lengthTokens.toLong()),
        Key(Role.LABELS) to Tensor.of(batch.labels, batch.rows.toLong(), batch.lengthTokens.toLong()),
    )

    private fun call(name: String, given: Map<Key, Tensor>, state: State): Map<Key, Tensor> =
        methods.call(name) { port -> if (port.role == Role.STATE) state.getValue(port.name) else given.getValue(Key.of(port)) }

    companion object {
        const val TRAIN_STEP = "train_step"
        const val NEXT_TOKEN = "next_token"
    }
}
