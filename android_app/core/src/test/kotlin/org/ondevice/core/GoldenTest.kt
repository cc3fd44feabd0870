package org.ondevice.core

import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.DynamicTest
import org.junit.jupiter.api.TestFactory
import java.io.File
import kotlin.math.sqrt

/** A step of a real block program has the golden gradients, which a script in float64 wrote without this project's code. */
class GoldenTest {
    /** With many labels and of two kinds of blocks, and with `ONDEVICE_TESTS_ALL=1` every case that the app takes. */
    @TestFactory
    fun aStepHasTheGoldenGradients(): List<DynamicTest> {
        val names = File(Fixtures.folder, "golden").list()!!.sorted()
        assertTrue(names.containsAll(listOf("gemma3_text", "llama, many labels")))
        return names.map { name -> DynamicTest.dynamicTest(name) { hold(name) } }
    }

    private fun hold(name: String) = PipeProgram(File(Fixtures.folder, "golden/$name/program"), Fixtures.python, Fixtures.root).use { program ->
        val folder = File(Fixtures.folder, "golden/$name")
        val case = Fixtures.json("golden/$name/case.json") as Map<*, *>
        val vectors = Safetensors.read(File(folder, "case.safetensors")).tensors
        val longs = { part: String -> (case[part] as List<*>).map { it as Long }.toLongArray() }
        val session = Session(Artifact.open(File(folder, "program")), program)
        session.load(session.state() + ("adapter" to vectors.getValue("adapter")))
        val batch = Batch((case["rows"] as Long).toInt(), (case["tokens"] as Long).toInt(), longs("ids"), longs("labels"))
        val result = session.step(batch, 0, 0.0)
        val loss = case["loss"] as Double
        assertEquals(loss, result.loss, 3e-6 * loss)
        // AdamW's first moment after one step from zero is a tenth of the gradient.
        val moment = session.state().getValue("exp_avg").floats!!
        val golden = vectors.getValue("gradient").floats!!
        val tensors = case["tensors"] as List<*>
        assertTrue(tensors.isNotEmpty())
        for (tensor in tensors.map { it as Map<*, *> }) {
            val start = (tensor["start"] as Long).toInt()
            var squares = 0.0
            for (index in start until start + (tensor["size"] as Long).toInt()) {
                val difference = moment[index] / 0.1 - golden[index]
                squares += difference * difference
            }
            val error = sqrt(squares)
            assertTrue(error <= tensor["limit"] as Double, "${tensor["name"]}: an error of $error, expected at most ${tensor["limit"]}")
        }
    }
}
