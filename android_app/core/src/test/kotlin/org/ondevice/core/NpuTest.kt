package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertInstanceOf
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Assumptions.assumeTrue
import org.junit.jupiter.api.Test
import java.io.File

/** Programs whose one method trains and evaluates. */
class NpuTest {
    private val artifact = Exported.ZEROTH_ORDER.artifact
    private val cpu = artifact.manifest
    private val copies = cpu.spec.methods.getValue("train_step").outputs.first { it.role == Role.LOSSES }.shape[0]
    private val queries = cpu.spec.methods.getValue("train_step").outputs.first { it.role == Role.PROJECTED_GRADIENTS }.shape[0]

    /** The manifest that the same model would have as one method, with one length. */
    private fun oneMethod(): Manifest {
        val step = cpu.spec.methods.getValue("train_step")
        val rows = copies * cpu.batchSize
        val tokens = step.inputs.map { if (it.role == Role.IDS || it.role == Role.LABELS) it.copy(shape = listOf(rows, 64)) else it }
        val sums = listOf(Role.NLL_SUM, Role.TOKENS).map { Port(it.manifestName, it, DType.FLOAT32, listOf(rows)) }
        val method = step.copy(inputs = tokens + Port("scale", Role.CONSTANT, DType.FLOAT32, listOf(1)), outputs = step.outputs + sums)
        val spec = cpu.spec.copy(
            methods = mapOf("train_step" to method), constants = listOf(Constant("scale", 0.125, 0.0)), batchCopies = copies, evaluatesWith = "train_step",
        )
        return cpu.copy(spec = spec, lengthsTokens = listOf(64), evalBatchSize = rows).also(ManifestCheck::check)
    }

    /** Hands the calls of one method to the two methods of the real CPU program, and checks how they are made. */
    private inner class TwoInOne(private val real: Program) : Program {
        override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
            assertEquals("train_step", method)
            val (ids, labels) = inputs.take(2).map { it.longs() }
            val rows = copies * cpu.batchSize
            val scale = inputs.last().floats()[0]
            val batch = 64 * cpu.batchSize
            val step = if (scale != 0f) {
                assertEquals(0.125f, scale)
                for (index in ids.indices) assertTrue(ids[index] == ids[index % batch] && labels[index] == labels[index % batch], "copy $index")
                real.execute("train_step", listOf(ids, labels).map { Tensor.of(it.copyOf(batch), cpu.batchSize.toLong(), 64) } + inputs.subList(2, 6))
            } else {
                listOf(Tensor.of(FloatArray(copies), copies.toLong()), Tensor.of(FloatArray(queries), queries.toLong()), inputs[2])
            }
            return step + sums(ids, labels, inputs[2], rows)
        }

        private fun sums(ids: LongArray, labels: LongArray, adapter: Tensor, rows: Int): List<Tensor> {
            val sums = List(2) { FloatArray(rows) }
            for (first in 0 until rows step cpu.evalBatchSize) {
                val part = { values: LongArray ->
                    Tensor.of(LongArray(64 * cpu.evalBatchSize) { values.getOrElse(first * 64 + it) { 0L } }, cpu.evalBatchSize.toLong(), 64)
                }
                val found = real.execute("evaluate", listOf(part(ids), part(labels), adapter))
                for (row in 0 until minOf(cpu.evalBatchSize, rows - first)) for (kind in 0..1) sums[kind][first + row] = found[kind].floats()[row]
            }
            return sums.map { Tensor.of(it, rows.toLong()) }
        }

        override fun close() {}
    }

    @Test
    fun oneMethodTrainsAndEvaluatesAsTwoDo() {
        val items = Runs.items(cpu, "valid")
        val adapters = listOf(cpu.copy(lengthsTokens = listOf(64)) to Runs.program, oneMethod() to TwoInOne(Runs.program)).map { (manifest, program) ->
            val session = Session(Artifact(artifact.folder, manifest), program)
            val batches = Batches(Runs.items(cpu, "train").map { it.example }, cpu.batchSize, listOf(64), 7, Runs.tokenizer.padId)
            for (step in 0 until 3) session.step(batches.at(step), step, 0.01)
            session.adapter to Evaluator(items, Runs.tokenizer.padId).run(session)!!
        }
        assertArrayEquals(adapters[0].first, adapters[1].first)
        val (two, one) = adapters.map { it.second }
        assertEquals(two.accuracy to two.tokens, one.accuracy to one.tokens)
        assertEquals(two.loss, one.loss, 1e-6)
    }

    /** The real NPU program in Qualcomm's simulator, against `ondevice run` in the same simulator. */
    @Test
    fun simulatedNpuProgramGivesPythonsRun() {
        val reason = File(Fixtures.folder, "npu.txt")
        assumeTrue(!reason.isFile || File(Fixtures.folder, "npu").isDirectory, "no simulator here: ${reason.takeIf { it.isFile }?.readText()}")
        val artifact = Artifact.open(File(Fixtures.folder, "npu"))
        assertTrue(artifact.manifest.spec.evaluatesWith == "train_step" && artifact.manifest.soc == "SM8650")
        val folder = Fixtures.scratch()
        PipeProgram(artifact.folder, Fixtures.python, Fixtures.root).use { program ->
            val session = Session(artifact, program)
            val trainer = Runs.trainer(session, folder, TrainSettings(steps = 4, learningRate = 0.01, checkpointEvery = 100, evaluateBefore = false), evaluate = true)
            trainer.run()
            assertInstanceOf(TrainerState.Finished::class.java, trainer.state, trainer.state.toString())
        }
        val (ours, theirs) = listOf(folder, File(Fixtures.folder, "npu run")).map { EventLog.read(File(it, "events.jsonl")) }
        assertEquals(4, theirs.losses.size)
        assertEquals(theirs.losses.map { it.second.toFloat() }, ours.losses.map { it.second.toFloat() })
        val (one, other) = listOf(ours, theirs).map { log -> log.entries.single { it.kind == "evaluate" } }
        assertEquals(other.number("loss")!!, one.number("loss")!!, 1e-9)
        assertEquals(other.number("accuracy"), one.number("accuracy"))
    }
}
