package org.ondevice.core

import java.io.File
import kotlin.math.ln

/**
 * A program whose methods are functions of one block: the host walks the layers, and hands in weights where the file is
 * mapped. `exporters/executorch/blocks.py` is the same walk in Python; develop/block-programs.md describes it.
 *
 * A step is embedding, every block forward, the head tile by tile over labelled positions, and every block backward with
 * its update. Only block inputs, the adapter and the optimizer's vectors are this process's memory. N is rows times
 * tokens, D the model's width, C the positions that the head takes at once. Where the loss is scaled, a step whose numbers
 * are not finite is left out: nothing changes but the scale, which is halved as long as it can be. What blocks read besides
 * hidden states (embeddings of the tokens for a layer, another layer's keys and values) lives as long as a [Pass].
 *
 * @throws OndeviceException [ErrorKind.ARTIFACT]: the weights file is damaged or of another model.
 */
internal class BlockSteps(artifact: Artifact, program: Program) : ProgramCalls {
    private val manifest = artifact.manifest
    private val spec = manifest.spec
    private val info = spec.blocks!!
    private val layers = info.layers
    private val methods = Methods(spec, program)
    private val weights = MappedWeights(File(artifact.folder, info.weights))
    private val headRows: Int
    private val width: Int

    /** A tile of the head, from [firstRow] on; no tile before had the rows from [start] on. All have the same number. */
    private class Tile(val firstRow: Int, val start: Int)

    private val tiles: List<Tile>

    init {
        val hidden = spec.methods.getValue(HEAD_SUMS).inputs.first { it.role == Role.HIDDEN }
        headRows = hidden.shape[0]
        width = hidden.shape[1]
        val rows = tileRows(spec)
        tiles = (0 until info.vocab step rows).map { Tile(minOf(it, info.vocab - rows), it) }
        val ports = spec.methods.flatMap { (name, method) -> method.inputs.filter { it.role == Role.FROZEN }.map { it to info.layersOf(name) } }
        for ((port, own) in ports.distinct()) {
            for (layer in if (LAYER in port.name) own else listOf(0)) weights.check(port, nameOf(port, layer))
        }
    }

    override fun step(state: State, batch: Batch, scalars: Map<Key, Tensor>, weigh: Weigh?): Stepped {
        val pass = Pass(size(manifest.batchSize, batch.rows, batch.lengthTokens))
        val inputs = ArrayList<Tensor>()
        val last = forward(state, batch.ids, pass, inputs)
        val scale = scalars[Key(Role.LOSS_SCALE)]?.floats()?.get(0)
        val head = head(last.floats(), batch)
        val weighed = (weigh ?: { nll -> mean(nll, head.tokens) })(head.nll)
        val loss = weighed.loss
        val first = gradient(last.floats(), head, weighed.weights, batch.lengthTokens, scale ?: 1f)
        if (!loss.isFinite() || !isFinite(first)) throw notFinite("the loss is not finite", "$loss")
        val next = spec.state.associate { it.name to FloatArray(it.shape[0]) }
        var gradient = vector(first)
        for (layer in layers - 1 downTo 0) {
            val given = scalars + mapOf(Key(Role.HIDDEN) to inputs.removeAt(layer), Key(Role.GRADIENT) to gradient)
            val outputs = block("$BACKWARD${pass.size}${info.endOfName(layer)}", given, state, layer, pass = pass)
            gradient = outputs.getValue(Key(Role.GRADIENT))
            for ((name, values) in next) {
                val range = outputs.getValue(Key(Role.STATE, name)).floats()
                if (!isFinite(range)) {
                    if (scale == null || scale <= SMALLEST_LOSS_SCALE) {
                        throw notFinite("the gradient of layer $layer is not finite", scale?.let { "loss scale $it" } ?: "values in its $name that are no numbers")
                    }
                    val warning = "the gradient of layer $layer is not finite; nothing was updated; the loss scale is now ${scale / 2}"
                    return Stepped(StepResult(loss, floatArrayOf(loss.toFloat()), FloatArray(0), warning, weighed.figures), null)
                }
                range.copyInto(values, layer * range.size)
            }
        }
        return Stepped(StepResult(loss, floatArrayOf(loss.toFloat()), FloatArray(0), figures = weighed.figures), next.mapValues { vector(it.value) })
    }

    override fun evaluate(state: State, batch: Batch, scalars: Map<Key, Tensor>): RowLosses {
        val last = forward(state, batch.ids, Pass(size(manifest.evalBatchSize, batch.rows, batch.lengthTokens)), null)
        return head(last.floats(), batch).let { RowLosses(it.nll, it.tokens) }
    }

    override val nextTokenColumns: Int get() = manifest.longestTokens

    override fun nextToken(state: State, ids: LongArray, length: Int): FloatArray {
        return logits(forward(state, ids, Pass(size(1, 1, ids.size)), null).floats(), length - 1)
    }

    override fun reader(state: State, padId: Int): TokenReader =
        if (CachedReader.BLOCK_DECODE in spec.methods) CachedReader(this, spec, state) else super.reader(state, padId)

    /** Logits [vocabulary] behind the token at [place] of hidden states [N, D]. */
    fun logits(states: FloatArray, place: Int): FloatArray {
        val hidden = vector(states.copyOfRange(place * width, (place + 1) * width))
        val logits = FloatArray(info.vocab)
        for (tile in tiles) {
            val values = block(HEAD_LOGITS, mapOf(Key(Role.HIDDEN) to hidden), emptyMap(), firstRow = tile.firstRow).getValue(Key(Role.LOGITS))
            values.floats().copyInto(logits, tile.firstRow)
        }
        return logits
    }

    private fun size(expected: Int, rows: Int, tokens: Int): String {
        if (rows != expected) throw artifactError("the program takes $expected rows", expected, rows)
        if (tokens !in manifest.lengthsTokens) {
            throw artifactError("the program has no method for $tokens tokens", "a length among ${manifest.lengthsTokens}", tokens)
        }
        return sizeOf(rows, tokens)
    }

    /** A way through the layers and back; [read] has the ids, the first block's input, and what blocks hand to each other. */
    class Pass(val size: String, val read: MutableMap<Key, Tensor> = HashMap()) {
        fun shared(port: Port): Tensor = read[Key.of(port)]
            ?: if (port.role.isSum) vector(FloatArray(port.count)) else throw artifactError("no block before gave what this one reads", received = port)
    }

    /** The last block's output [N, D]; the input of every block goes into [inputs] if there is one. */
    private fun forward(state: State, ids: LongArray, pass: Pass, inputs: MutableList<Tensor>?): Tensor {
        pass.read[Key(Role.IDS)] = Tensor.of(ids, ids.size.toLong())
        var hidden = block("$EMBED${pass.size}", pass.read, state).getValue(Key(Role.HIDDEN))
        pass.read[Key(Role.HIDDEN)] = hidden
        for (layer in 0 until layers) {
            inputs?.add(hidden)
            val name = "$FORWARD${pass.size}${info.endOfName(layer)}"
            hidden = block(name, mapOf(Key(Role.HIDDEN) to hidden), state, layer, pass = pass).getValue(Key(Role.HIDDEN))
        }
        return hidden
    }

    /** The mean over all labelled tokens. */
    private fun mean(nll: FloatArray, tokens: LongArray): Weighed {
        val count = maxOf(1L, tokens.sum())
        return Weighed(Means.sum(nll).toDouble() / count, DoubleArray(nll.size) { 1.0 / count })
    }

    /** Positions that went through the head together, with what their gradient needs: hidden states, targets, sums over all tiles. */
    private class Part(val places: List<Int>, val given: MutableMap<Key, Tensor>)

    private class Head(val nll: FloatArray, val tokens: LongArray, val parts: List<Part>)

    /**
     * Each row's summed negative log likelihood and labelled tokens.
     *
     * Only positions with a label go through the head, [headRows] at a time; the last of them are filled up with rows of
     * weight 0.
     */
    private fun head(x: FloatArray, batch: Batch): Head {
        val length = batch.lengthTokens
        val places = (0 until batch.rows * length).filter { it % length < length - 1 && batch.labels[it + 1] != IGNORE.toLong() }
        val nll = FloatArray(batch.rows)
        val tokens = LongArray(batch.rows)
        for (place in places) tokens[place / length]++
        val parts = places.chunked(headRows).map { part ->
            val hidden = FloatArray(headRows * width)
            for ((row, place) in part.withIndex()) x.copyInto(hidden, row * width, place * width, (place + 1) * width)
            val given = mutableMapOf(
                Key(Role.HIDDEN) to vector(hidden),
                Key(Role.TARGETS) to Tensor.of(LongArray(headRows) { if (it < part.size) batch.labels[part[it] + 1] else -1L }, headRows.toLong()),
            )
            val sums = SUMS.associateWith { name -> vector(FloatArray(headRows) { if (name == SUMS[0]) LOWEST else 0f }) }
            for ((name, tensor) in sums) given[Key(Role.TILE_SUMS, name)] = tensor
            for (tile in tiles) given.putAll(tile(HEAD_SUMS, given, tile))
            val (maximum, total, wanted) = SUMS.map { given.getValue(Key(Role.TILE_SUMS, it)).floats() }
            for ((row, place) in part.withIndex()) nll[place / length] += maximum[row] + ln(total[row].toDouble()).toFloat() - wanted[row]
            Part(part, given)
        }
        return Head(nll, tokens, parts)
    }

    /** [scale] times the gradient of [x] [N, D] of the rows' negative log likelihoods times their [weights]. */
    private fun gradient(x: FloatArray, head: Head, weights: DoubleArray, length: Int, scale: Float): FloatArray {
        val gradient = FloatArray(x.size)
        for (part in head.parts) {
            val given = part.given
            val scales = FloatArray(headRows) { if (it < part.places.size) (scale.toDouble() * weights[part.places[it] / length]).toFloat() else 0f }
            given[Key(Role.TOKEN_SCALE)] = vector(scales)
            given[Key(Role.GRADIENT)] = vector(FloatArray(headRows * width))
            for (tile in tiles) given.putAll(tile(HEAD_GRADIENT, given, tile))
            val found = given.getValue(Key(Role.GRADIENT)).floats()
            for ((row, place) in part.places.withIndex()) found.copyInto(gradient, place * width, row * width, (row + 1) * width)
        }
        return gradient
    }

    private fun tile(name: String, given: Map<Key, Tensor>, tile: Tile): Map<Key, Tensor> {
        val place = mapOf(Key(Role.TILE_FIRST) to scalar(tile.firstRow.toLong()), Key(Role.TILE_SKIP) to scalar((tile.start - tile.firstRow).toLong()))
        return block(name, given + place, emptyMap(), firstRow = tile.firstRow)
    }

    /**
     * Run a function; its outputs by role.
     *
     * @param layer whose weights and ranges of the state go in.
     * @param firstRow of a table at which the tile begins.
     * @param pass takes what the block gives to other blocks, and gives what it reads of them.
     */
    fun block(name: String, given: Map<Key, Tensor>, state: State, layer: Int = 0, firstRow: Int = 0, pass: Pass = Pass("")): Map<Key, Tensor> {
        val outputs = methods.call(name, layer) { port ->
            when {
                port.role == Role.FROZEN -> weights.tensor(port, nameOf(port, layer), firstRow)
                port.role == Role.STATE -> state.getValue(port.name).floats().let { all -> vector(all.copyOfRange(layer * port.shape[0], (layer + 1) * port.shape[0])) }
                port.role == Role.LAYER_INPUT -> block("$LAYER_INPUT${pass.size}", pass.read, state, layer).getValue(Key(Role.LAYER_INPUT)).reshaped(port.lengths())
                port.role.isShared -> pass.shared(port).reshaped(port.lengths())
                else -> given.getValue(Key.of(port)).reshaped(port.lengths())
            }
        }
        val (shared, own) = outputs.entries.partition { it.key.role.isShared }
        for ((key, tensor) in shared) pass.read[key] = tensor
        return own.associate { it.key to it.value }
    }

    private fun nameOf(port: Port, layer: Int) = ofLayer(port.name, layer)

    private fun notFinite(what: String, received: String) = OndeviceException(
        ErrorKind.TRAINING, "$what; nothing was updated", "a finite number", received,
        "start a run with a lower learning rate; what this run saved is kept",
    )

    companion object {
        const val EMBED = "embed_"
        const val LAYER_INPUT = "layer_input_"
        const val FORWARD = "block_forward_"
        const val BACKWARD = "block_backward_"
        const val HEAD_SUMS = "head_sums"
        const val HEAD_GRADIENT = "head_gradient"
        const val HEAD_LOGITS = "head_logits"
        const val LAYER = "{layer}"

        /** Largest logit so far, sum of exponentials below it, the target's logit. */
        val SUMS = listOf("maximum", "total", "wanted")

        /** The largest logit before the first tile. */
        private const val LOWEST = -1e30f

        /** A step that is not finite at this scale is an error. */
        const val SMALLEST_LOSS_SCALE = 1.0

        /** A name with the layer's number in it. */
        fun ofLayer(name: String, layer: Int) = name.replace(LAYER, "$layer")

        fun sizeOf(rows: Int, tokens: Int) = "${rows}x$tokens"

        /** Rows of the vocabulary that a tile has. */
        fun tileRows(spec: ProgramSpec): Int = spec.methods.getValue(HEAD_SUMS).inputs.last { it.role == Role.FROZEN }.shape[0]

        private fun isFinite(values: FloatArray): Boolean = values.all { it.isFinite() }
    }
}
