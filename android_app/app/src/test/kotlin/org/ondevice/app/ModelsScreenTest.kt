package org.ondevice.app

import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertTrue
import org.junit.Test
import org.robolectric.RuntimeEnvironment
import java.io.File

class ModelsScreenTest : AppTest() {
    @Test
    fun saysWhatToDoWhenThereIsNothing() {
        open()
        untilSaid("No model yet", "ondevice export")
        shot("models-empty")
    }

    @Test
    fun importsAZipAndShowsWhatItNeeds() {
        open()
        pick(ModelsScreen.ZIP, "film reviews.zip", zip(artifact))
        until("the import") { app.store.models().isNotEmpty() && app.jobs.words(ModelsScreen.PLACE) == null }
        val model = app.store.models().single()
        assertEquals("film reviews", model.name)
        untilSaid("2, up to 32, 64 tokens each", "executorch 1.5.1")
        untilSaid(Words.bytes(app, model.sizeBytes), Words.bytes(app, model.plannedBytes))
        shot("models")
        rotate()
        untilSaid("film reviews")
        shot("models-landscape")
    }

    @Test
    fun refusesADamagedZipAndKeepsNothing() {
        open()
        val folder = File(app.cacheDir, "damaged").also { artifact.copyRecursively(it) }
        val program = File(folder, "program.pte")
        program.writeBytes(program.readBytes().also { it[it.size / 2] = (it[it.size / 2] + 1).toByte() })
        pick(ModelsScreen.ZIP, "damaged.zip", zip(folder))
        until("the refusal") { app.jobs.error(ModelsScreen.PLACE) != null }
        untilSaid("program.pte", "SHA-256")
        assertTrue(app.store.models().isEmpty())
        assertEquals(emptyList<String>(), File(app.filesDir, "models").list().orEmpty().toList())
        shot("models-damaged")
        click("Dismiss")
        assertFalse("SHA-256" in texts())
    }

    @Test
    fun showsAModelThatCannotBeUsedAndDeletesIt() {
        importModel("broken")
        File(app.filesDir, "models/broken/manifest.json").writeText("{\"schema_version\": 99}")
        open()
        untilSaid("This model cannot be used.", "schema_version 2")
        click("Delete the model broken".takeIf { it in descriptions() } ?: "Delete")
        val question = confirm()
        assertTrue(question, "Its adapters are kept" in question) // the model goes a moment later
        until("the deletion") { app.store.models().isEmpty() }
        until("the screen") { "No model yet" in texts() }
    }

    private fun descriptions() = views(activity.window.decorView).mapNotNull { it.contentDescription?.toString() }

    @Test
    fun looksRightAtNight() {
        RuntimeEnvironment.setQualifiers("+night")
        importModel()
        open()
        shot("models-night")
    }

    /** The text that names a field. */
    private fun label(field: android.view.View): CharSequence? =
        views(activity.window.decorView).filterIsInstance<android.widget.TextView>().firstOrNull { it.labelFor == field.id }?.text

    @Test
    fun everyButtonIsLargeEnoughAndHasAName() {
        importModel()
        importData()
        open()
        for (tab in 0..4) {
            activity.open(tab)
            settle()
            for (view in views(activity.window.decorView).filter { it.isClickable && it.isShown && it.width > 0 }) {
                val name = view.contentDescription ?: (view as? android.widget.TextView)?.text?.ifEmpty { null } ?: label(view)
                assertTrue("tab $tab: $view has no name", !name.isNullOrBlank())
                assertTrue("tab $tab: '$name' is ${view.height} px high", view.height >= 48 * 2)
            }
        }
    }
}
