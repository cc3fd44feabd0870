package org.ondevice.core

/**
 * Reads a text token after token, and says what comes next.
 *
 * @property contextTokens most tokens that are looked at; null where older ones are forgotten as newer ones come.
 */
interface TokenReader {
    val contextTokens: Int?

    /**
     * Logits [vocabulary] of the token behind what was read, once [ids] are read too.
     *
     * @throws OndeviceException [ErrorKind.DATA]: no token, or more than [contextTokens] in all.
     */
    fun feed(ids: IntArray): FloatArray
}

/** Refuse [ids] that do not fit behind the [read] tokens of a text. */
internal fun checkRoom(ids: IntArray, read: Int, context: Int) {
    if (ids.isEmpty() || read + ids.size > context) {
        throw dataError("the text is longer than the program's context", "1 to $context tokens", "${read + ids.size}", "write less, or begin anew")
    }
}

/** Every token computes the whole row anew, of which the program keeps nothing. */
internal class WholeRowReader(private val columns: Int, private val padId: Int, private val nextToken: (LongArray, Int) -> FloatArray) : TokenReader {
    private var read = IntArray(0)

    override val contextTokens: Int? get() = null

    override fun feed(ids: IntArray): FloatArray {
        read = (read + ids).let { if (it.size > columns) it.copyOfRange(it.size - columns, it.size) else it }
        return nextToken(LongArray(columns) { (if (it < read.size) read[it] else padId).toLong() }, read.size)
    }
}

/**
 * A block program's functions that keep keys and values: only new tokens are computed, a prompt many at a time.
 * `exporters/executorch/blocks_model.py` is the same in Python; develop/block-programs.md describes it.
 *
 * Keys are kept [heads, width, context] and values [heads, context, width], as the products of attention read them.
 */
internal class CachedReader(private val steps: BlockSteps, private val spec: ProgramSpec, private val state: State) : TokenReader {
    private val heads: Int
    private val width: Int
    private val context: Int
    private val chunk: Int
    private val keys: List<FloatArray>
    private val values: List<FloatArray>
    private var read = 0

    init {
        val kept = spec.methods.getValue(BLOCK_DECODE).inputs.first { it.role == Role.KEYS }
        heads = kept.shape[0]
        width = kept.shape[1]
        context = kept.shape[2]
        chunk = spec.methods.getValue(EMBED_PREFILL).inputs.first { it.role == Role.IDS }.shape[1]
        keys = List(spec.blocks!!.layers) { FloatArray(kept.count) } // zeros: what is masked is still multiplied
        values = List(spec.blocks.layers) { FloatArray(kept.count) }
    }

    override val contextTokens: Int get() = context

    override fun feed(ids: IntArray): FloatArray {
        checkRoom(ids, read, context)
        var at = 0
        while (true) {
            val size = if (ids.size - at > 1 && read + chunk <= context) chunk else 1
            val count = minOf(size, ids.size - at)
            val hidden = pass(ids, at, count, size)
            read += count
            at += count
            if (at == ids.size) return steps.logits(hidden, count - 1)
        }
    }

    /** Hidden states of [size] tokens; behind the [count] of [ids] from [at] on they are of padding, and not kept. */
    private fun pass(ids: IntArray, at: Int, count: Int, size: Int): FloatArray {
        val row = Tensor.of(LongArray(size) { if (it < count) ids[at + it].toLong() else 0L }, size.toLong())
        var hidden = steps.block(if (size == 1) EMBED_DECODE else EMBED_PREFILL, mapOf(Key(Role.IDS) to row), state).getValue(Key(Role.HIDDEN))
        for (layer in keys.indices) {
            val given = mapOf(
                Key(Role.HIDDEN) to hidden, Key(Role.POSITION) to scalar(read.toLong()),
                Key(Role.KEYS) to vector(keys[layer]), Key(Role.VALUES) to vector(values[layer]),
            )
            val outputs = steps.block(if (size == 1) BLOCK_DECODE else BLOCK_PREFILL, given, state, layer)
            hidden = outputs.getValue(Key(Role.HIDDEN))
            keep(outputs.getValue(Key(Role.KEYS)).floats(), outputs.getValue(Key(Role.VALUES)).floats(), layer, count, size)
        }
        return hidden.floats()
    }

    private fun keep(newKeys: FloatArray, newValues: FloatArray, layer: Int, count: Int, size: Int) {
        for (line in 0 until heads * width) newKeys.copyInto(keys[layer], line * context + read, line * size, line * size + count)
        for (head in 0 until heads) {
            val first = head * size * width
            newValues.copyInto(values[layer], (head * context + read) * width, first, first + count * width)
        }
    }

    companion object {
        const val EMBED_PREFILL = "embed_prefill"
        const val BLOCK_PREFILL = "block_prefill"
        const val EMBED_DECODE = "embed_decode"
        const val BLOCK_DECODE = "block_decode"
    }
}
